"""Contract: padding, wherever it stands and whatever it holds, never changes a valid output or a gradient."""

import torch

from tests.common.cases import each_component, each_part
from tests.helpers import close, close_gradients, gradients, pad, tokens

LENGTHS = (1, 2, 7, 13)


@each_part
def test_padding_changes_nothing(case):
    """Padding that is added, on a side or on both, and its contents; forward and gradients."""
    model, ids = case.shared(), tokens(2, 7)
    expected = case.run(model, ids)
    expected_gradients = gradients(model, expected)
    close(case.run(model, ids, torch.ones_like(ids)), expected)
    for where in ("right", "left"):
        padded, mask = pad(list(ids), 12, where)
        with torch.no_grad():
            close(case.run(model, padded, mask)[mask.bool()].view_as(expected), expected)
        padded, mask = pad(list(ids), 12, where, seed=5)
        valid = case.run(model, padded, mask)[mask.bool()].view_as(expected)
        close(valid, expected)
        close_gradients(gradients(model, valid), expected_gradients)


@each_component
def test_padding_between_tokens(case):
    """Tokens are counted, not slots: real ones give what they give side by side (peft puts virtual tokens before a
    text and its padding)."""
    model, ids = case.shared(), tokens(2, 7)
    places = torch.tensor([[0, 1, 2, 7, 8, 9, 10], [1, 3, 4, 6, 8, 9, 11]])
    padded, mask = tokens(2, 12, seed=5).scatter(1, places, ids), torch.zeros(2, 12).long().scatter(1, places, 1)
    with torch.no_grad():
        output = case.run(model, padded, mask)
        close(output[mask.bool()].view(2, 7, -1), case.run(model, ids))


@each_part
def test_one_by_one(case):
    """A batch of lengths 1, 2, 7 and 13 gives each text what it gets alone and unpadded."""
    model = case.shared()
    rows = [tokens(length, seed=length) for length in LENGTHS]
    with torch.no_grad():
        alone = [case.run(model, row[None])[0] for row in rows]
        for where in ("right", "left"):
            batch, mask = pad(rows, max(LENGTHS), where, seed=9)
            output = case.run(model, batch, mask)
            for index, expected in enumerate(alone):
                close(output[index][mask[index].bool()], expected)


@each_part
def test_rows_of_padding_alone(case):
    """Finite outputs and gradients, and the other rows do not notice."""
    model, ids = case.shared(), tokens(3, 7)
    alone = case.run(model, ids[1:2])
    for empty in ([0, 2], [0, 1, 2]):
        mask = torch.ones_like(ids)
        mask[empty] = 0
        output = case.run(model, ids, mask)
        assert output.isfinite().all()
        if 1 not in empty:
            close(output[1:2], alone)
        with torch.no_grad():  # their sublayers give zeros on every path
            close(case.run(case.shared(implementation="eager"), ids, mask)[empty], output[empty].detach())
        for name, gradient in gradients(model, output).items():
            assert gradient.isfinite().all(), name


@each_component
def test_half_precision(case):
    """bfloat16 is finite, padded rows included, and near float32."""
    ids, mask = pad([tokens(9), tokens(4, seed=1)], 9, "right")
    mask = torch.cat([mask, torch.zeros(1, 9, dtype=mask.dtype)])
    ids = torch.cat([ids, ids[:1]])
    with torch.no_grad():
        expected = case.run(case.shared(torch.float32), ids, mask)
        output = case.run(case.shared(torch.bfloat16), ids, mask)
    assert output.dtype == torch.bfloat16 and output.isfinite().all()
    error = (output.float() - expected)[mask.bool()]
    spread = expected[mask.bool()].std()
    assert error.abs().mean() < 0.03 * spread, f"mean error {error.abs().mean() / spread:.3f} of the logits' spread"


@each_component
def test_half_precision_gradients(case):
    model, ids = case.shared(torch.bfloat16), tokens(2, 9)
    for name, gradient in gradients(model, case.run(model, ids).float()).items():
        assert gradient.isfinite().all(), name
