"""UniLM's four masks: the printed ones, what each hides, and writing under them."""

import pytest
import torch

from hf_xformers import XFBertConfig, XFBertForMaskedLM, XFUniLMConfig, XFUniLMForMaskedLM
from hf_xformers.modeling.cloze_writing import write_targets
from hf_xformers.stacks.mask_modes import mode_mask
from tests.helpers import NO_DROPOUT, close, make_strong, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
BOTH, LEFT, RIGHT, PAIR = range(4)


def model_of(implementation="sdpa", **fields):
    config = XFUniLMConfig(**{**SIZES, **NO_DROPOUT, "max_position_embeddings": 64, **fields})
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return make_strong(XFUniLMForMaskedLM(config), amount=0.4).double().eval()


@torch.no_grad()
def logits_of(model, ids, modes, mask=None, **more):
    return model(input_ids=ids, attention_mask=mask, mask_modes=torch.tensor(modes), **more).logits


def test_printed_masks():
    index = torch.arange(5)
    source = (index < 3).expand(4, 5)
    found = mode_mask(torch.arange(4), source, index, index).long().tolist()
    assert found[BOTH] == [[1] * 5] * 5
    assert found[LEFT] == torch.ones(5, 5).tril().long().tolist()
    assert found[RIGHT] == torch.ones(5, 5).triu().long().tolist()
    assert found[PAIR] == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_what_each_mask_hides(side, implementation):
    """A batch with all four: of every token, which logits move when it changes, over two layers."""
    model, length, first = model_of(implementation), 7, 3
    ids, real = tokens(4, length, high=50), torch.ones(4, length).long()
    if side != "none":
        real[:, :2] = 0
        real = real if side == "left" else real.flip(1)
    start = 2 if side == "left" else 0
    modes = [[BOTH, 0], [LEFT, 0], [RIGHT, 0], [PAIR, first]]
    before = logits_of(model, ids, modes, real)
    for place in range(length):
        other = ids.clone()
        other[:, place] = (other[:, place] + 7) % 50
        moved = (logits_of(model, other, modes, real) != before).any(-1)
        for row, (mode, _) in enumerate(modes):
            for at in real[row].nonzero().flatten().tolist():
                seen = {
                    BOTH: True,
                    LEFT: place <= at,
                    RIGHT: place >= at,
                    PAIR: place < start + first or start + first <= place <= at,
                }[mode]
                assert bool(moved[row, at]) == (seen and bool(real[row, place])), (mode, place, at)
    for row, mode in enumerate(modes):  # alone and without padding a row is the same
        close(
            logits_of(model, ids[row : row + 1, real[row].bool()], [mode]),
            before[row : row + 1, real[row].bool()],
            1e-9,
        )
    # A row of one mode alone, or all of them alike, share a mask.
    for mode in modes[:3]:
        alike = logits_of(model, ids, [mode] * 4)
        close(alike[2:3], logits_of(model, ids[2:3], [mode]), 1e-9)


@pytest.mark.parametrize("position", ["rotary", "t5_relative_bias", "learned_absolute"])
def test_writing_with_a_cache_is_writing_without(position):
    """Padding on both sides; and every token is the likeliest one of the full pass with a mask in its place."""
    model = model_of(position=position)
    ids = tokens(2, 6, low=5, high=50)
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
    settings = dict(mask_token_id=4, ends=(), max_new_tokens=6)
    found = write_targets(model, ids, real, **settings)
    assert found == write_targets(model, ids, real, use_cache=False, **settings)
    for row, written in enumerate(found):
        source = ids[row, real[row].bool()].tolist()
        for place, token in enumerate(written):
            text = [*source, *written[:place], 4]
            types = torch.tensor([[4] * len(source) + [5] * (place + 1)])
            logits = logits_of(model, torch.tensor([text]), [[PAIR, len(source)]], token_type_ids=types)
            assert int(logits[0, -1].argmax()) == token
    stopped = write_targets(model, ids, real, mask_token_id=4, ends=(found[0][2],), max_new_tokens=6)
    assert stopped[0] == found[0][: found[0].index(found[0][2])]


def test_refusals():
    model, ids = model_of(), tokens(1, 5, high=50)
    for modes, message in (
        ([[0]], r"must be \[batch, 2\] = \[1, 2\]"),
        ([[4, 0]], "modes from 4 to 4; they are 0 to 3"),
    ):
        with pytest.raises(ValueError, match=message):
            logits_of(model, ids, modes)
    with pytest.raises(ValueError, match="goes with a .* `attention_mask`"):
        logits_of(model, ids, [[1, 0]], torch.zeros(1, 1, 5, 5).double())
    with pytest.raises(ValueError, match="has stack 'plain'"):
        write_targets(XFBertForMaskedLM(XFBertConfig(**SIZES)), ids, mask_token_id=4, ends=())
