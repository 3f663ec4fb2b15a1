"""Synthesizers: mixtures of kinds, fixed tables, and how long a text may be."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForMaskedLM
from tests.attention.references.softmax import synthesizer
from tests.attention.score_helpers import (
    GEOMETRY,
    HEADS,
    build_layers,
    make_context,
    run_layers,
    saved_sizes,
    small_blocks,
    vectors,
)
from tests.helpers import close, make_strong, tokens

LENGTH = 24  # places of GEOMETRY


def build(kind, count=1, causal=False, config=None, **fields):
    layers = build_layers({"type": "synthesizer", "kind": kind, **fields}, count, causal, **(config or {}))
    for layer in layers:
        if "fixed_random" in kind:
            torch.manual_seed(5)
            layer.fixed_table.normal_()
    return layers


def test_mixtures():
    """A one-hot mixture is its member; a sigmoid of zero is the average with dot; the sum is the sum."""
    states = vectors(1, 6)

    def output(layer):
        return run_layers([layer], states, make_context(6))[0].output.detach()

    (layer,) = build("dense+random+dot")
    for number, member in enumerate(layer.members):
        with torch.no_grad():
            layer.mixture.copy_(torch.eye(3, dtype=torch.float64)[number] * 1e4)
        shares = dict.fromkeys(layer.members, 0.0) | {member: 1.0}
        close(output(layer), synthesizer(layer, states, shares=shares)[0].detach())
    (layer,) = build("random+dot", mixture="sigmoid")
    for number, share in ((0.0, 0.5), (1.3, 1 / (1 + math.exp(-1.3)))):
        with torch.no_grad():
            layer.mixture.fill_(number)
        close(output(layer), synthesizer(layer, states, shares={"random": share, "dot": 1 - share})[0].detach())
    (layer,) = build("random+dot", mixture="sum")
    assert layer.mixture is None
    close(output(layer), synthesizer(layer, states)[0].detach())


def test_equal_shares_at_the_start():
    (layer,) = build("random+dot+dense")
    layer.initialize(layer.config, torch.nn.init)
    close(torch.stack(list(layer._shares().values())), torch.full((3,), 1 / 3, dtype=torch.float64))
    bound = (6 / (2 * LENGTH)) ** 0.5
    assert 0.9 * bound < layer.random_table.abs().max() <= bound and (layer.dense_bias == 0).all()


def test_fixed_tables_stay(tmp_path):
    """Never trained, the same for the same seed, and saved with the model."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        config = XFormerConfig(**GEOMETRY, attention={"type": "synthesizer", "kind": "fixed_random"})
        models.append(XFormerForMaskedLM(config))
    model, ids = models[0], tokens(2, 6, high=50)
    table = model.model.trunk.layers[0].attention.fixed_table
    before = table.clone()
    assert torch.equal(before, models[1].model.trunk.layers[0].attention.fixed_table) and before.std() > 0.1
    assert not any("fixed_table" in name for name, _ in model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert torch.equal(table, before)
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    loaded = XFormerForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.trunk.layers[0].attention.fixed_table, before)


@pytest.mark.parametrize("kind", ["dense", "random", "factorized_dense+dot"])
def test_as_long_as_the_tables(kind):
    config = XFormerConfig(**GEOMETRY, position="none", attention={"type": "synthesizer", "kind": kind})
    torch.manual_seed(0)
    model = make_strong(XFormerForMaskedLM(config).double().eval())
    ids = tokens(2, LENGTH, high=50)
    with torch.no_grad(), small_blocks(7):
        expected = model(input_ids=ids).logits
        with pytest.raises(ValueError, match="25 tokens, but this synthesizer's tables have 24 places"):
            model(input_ids=tokens(2, LENGTH + 1, high=50))
        for side in ("left", "right"):  # padding takes no place
            padding = (3, 0) if side == "left" else (0, 3)
            padded, mask = (torch.nn.functional.pad(x, padding) for x in (ids, torch.ones_like(ids)))
            close(model(input_ids=padded, attention_mask=mask).logits[mask.bool()], expected.flatten(0, 1))
    config = XFormerConfig(**GEOMETRY, position="none", attention={"type": "synthesizer", "kind": kind})
    model = XFormerForCausalLM(config).eval()
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="25 tokens"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_tables_do_not_grow_with_the_batch():
    """Scores of places have no batch axis: what is kept for them is the same for one row and for eight."""
    (layer,) = build("random", max_length=60)
    for batch in (1, 8):
        assert saved_sizes(lambda: run_layers([layer], vectors(batch, 60), make_context(60)))[0] == HEADS * 60 * 60
