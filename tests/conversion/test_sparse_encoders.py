"""Encoders whose attention is sparse or approximate where texts are long, or rows full: what the cases in
`architectures/` cannot try with every head."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention
from transformers.models.bigbird_pegasus.modeling_bigbird_pegasus import BigBirdPegasusBlockSparseAttention

from hf_xformers.conversion.lookup import converter_for
from hf_xformers.ops.block_sparse.pattern_atoms import RandomBlocks
from tests.conversion.architectures import VOCAB, architectures
from tests.conversion.test_architectures import assert_exact, assert_same, round_trip

ALL = architectures()


def full_rows(length: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, VOCAB, (rows, length), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def with_our_blocks(monkeypatch, attention, ours):
    """Their `attention` draws our random blocks, of ten, layer after layer."""
    drawn = []
    for layer in ours.model.trunk.layers:
        atom = next(part for part in layer.attention.pattern.children() if isinstance(part, RandomBlocks)).bind(20)
        drawn.append([torch.stack(atom.for_head(i).drawn(torch.arange(1, 9)), 1).numpy() for i in range(4)])
    order = iter(drawn)
    monkeypatch.setattr(attention, "_bigbird_block_rand_mask_with_head", lambda *_, **__: next(order))


def test_bigbird_blocks(monkeypatch):
    """Long texts with our random blocks on both sides, and short texts in the same batch, which are read whole."""
    entry, head, fields = ALL["big_bird"], "BigBirdForMaskedLM", {"block_size": 2, "num_random_blocks": 1}
    model = entry.make(head, **fields)
    ours, back = round_trip(entry, model, head)
    assert_exact(model, back, entry.idle[head])
    with_our_blocks(monkeypatch, BigBirdBlockSparseAttention, ours)
    given = full_rows(19)
    with torch.no_grad():
        expected = model(**given).logits
        whole = entry.make(head, **fields)(**{name: tensor[:, :14] for name, tensor in given.items()}).logits
        short = {name: F.pad(tensor[:, :14], (0, 5)) for name, tensor in given.items()}
        got = ours(**{name: torch.cat([tensor, short[name]]) for name, tensor in given.items()}).logits
        alone = ours(**given).logits
    torch.testing.assert_close(got[:2], expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got[2:, :14], whole, rtol=1e-5, atol=2e-5)
    assert (got[2:, :14] - got[:2, :14]).abs().max() > 0.1


def test_bigbird_pegasus_blocks(monkeypatch):
    """A long text with our random blocks on both sides, under a decoder that reads all of it."""
    entry, head = ALL["bigbird_pegasus"], "BigBirdPegasusForConditionalGeneration"
    fields = {"block_size": 2, "num_random_blocks": 1}
    model = entry.make(head, **fields)
    ours, _ = round_trip(entry, model, head)
    with_our_blocks(monkeypatch, BigBirdPegasusBlockSparseAttention, ours)
    given = full_rows(20)
    given["decoder_input_ids"] = given["input_ids"][:, :5]
    with torch.no_grad():
        expected, got = model(**given).encoder_last_hidden_state, ours(**given).encoder_last_hidden_state
        whole = entry.make(head, **fields, attention_type="original_full")(**given).encoder_last_hidden_state
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)
    assert (whole - expected).abs().max() > 0.1


def test_bigbird_random_blocks_are_told():
    """transformers draws none in evaluation; the report says so where it matters."""
    for fields, count in (({}, 1), ({"num_random_blocks": 0}, 0), ({"attention_type": "original_full"}, 0)):
        notes: list[str] = []
        config = converter_for("big_bird").config_to_ours(ALL["big_bird"].config(**fields), notes)
        assert len(notes) == count
        assert config.attention.dense_length == (5 if "num_random_blocks" in fields else 9)


def test_nystromformer_with_padding():
    """Exact attention and a convolution of one token: padding on the right changes nothing on either side."""
    entry = ALL["nystromformer"]
    model = entry.make("NystromformerForMaskedLM", num_landmarks=4, segment_means_seq_len=4, conv_kernel_size=1)
    ours, back = round_trip(entry, model, "NystromformerForMaskedLM")
    assert_exact(model, back)
    given = full_rows(9)
    given["attention_mask"][1, 5:] = 0
    assert_same(entry, model, ours, given)
