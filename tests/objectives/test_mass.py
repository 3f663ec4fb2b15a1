"""MASS: the golden vector, where fragments lie, what a decoder sees, batches, refusals."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.modeling.language import XFormerForSeq2SeqLM
from hf_xformers.modeling_xformer import XFormerModel
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.mass import FragmentNoise, MassObjective, apply_noise, sample_noise
from hf_xformers.training.building import check_objective
from hf_xformers.variants import config_class

VOCABULARY = torch.arange(5, 40)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_golden_vector():
    ids = torch.tensor([0, 5, 6, 7, 8, 9, 10, 2])
    noise = FragmentNoise(2, 5, torch.ones(8, dtype=torch.int8), torch.zeros(8, dtype=torch.int64))
    inputs, read, written, places = apply_noise(ids, noise, 50)
    assert inputs.tolist() == [0, 5, 50, 50, 50, 9, 10, 2]
    assert (read.tolist(), written.tolist(), places.tolist()) == ([5, 6, 7], [6, 7, 8], [1, 2, 3])


def test_fragments():
    """Half of the text, a fifth each at both ends and the rest anywhere; never the first token; k = 1 and k = m."""
    draw, rows = generator(), 3000
    spec = MassObjective()
    noises = [sample_noise(1, 21, 22, spec, VOCABULARY, draw) for _ in range(rows)]
    assert {noise.stop - noise.start for noise in noises} == {10}
    starts = torch.tensor([noise.start for noise in noises]).bincount()
    assert len(starts) == 12 and starts[0] == 0
    for at in range(1, 12):
        share = 0.6 / 11 + 0.2 * (at in (1, 11))
        assert abs(int(starts[at]) - share * rows) < 4 * math.sqrt(rows * share * (1 - share))
    actions = torch.cat([noise.action for noise in noises])
    for action, share in ((0, 0.1), (1, 0.8), (2, 0.1)):
        assert abs(int((actions == action).sum()) - share * len(actions)) < 4 * math.sqrt(
            len(actions) * share * (1 - share)
        )
    uniform = MassObjective(start_mode="uniform")
    starts = torch.tensor([sample_noise(1, 21, 22, uniform, VOCABULARY, draw).start for _ in range(rows)]).bincount()
    assert abs(int(starts[1]) - rows / 11) < 4 * math.sqrt(rows / 11)
    one, whole = MassObjective(fragment_ratio=0.01), MassObjective(fragment_ratio=1)
    assert {sample_noise(1, 4, 5, one, VOCABULARY, draw).start for _ in range(60)} == {1, 2, 3}
    noise = sample_noise(1, 4, 5, whole, VOCABULARY, draw)
    assert (noise.start, noise.stop) == (1, 4)


def test_batches(bert_tokenizer):
    """Labels are the fragment, decoder inputs the tokens before; separators within it are no targets."""
    rows = [[2, *range(5, 25), 3], [2, 30, 31, 3, 32, 33, 3], [2, 3]]
    collator = build_objective("mass").collator(bert_tokenizer)
    for epoch in range(10):
        collator.set_epoch(epoch)
        batch = collator([{"input_ids": row} for row in rows])
        assert batch["labels"].shape == batch["decoder_position_ids"].shape == (3, 10)
        for index, row in enumerate(rows):
            ids = torch.tensor(row)
            real = batch["decoder_attention_mask"][index].bool()
            places, labels = batch["decoder_position_ids"][index][real], batch["labels"][index][real]
            assert torch.equal(batch["decoder_input_ids"][index][real], ids[places])
            if index == 2:
                assert labels.tolist() == [-100]
                continue
            assert torch.equal(labels, ids[places + 1].masked_fill(ids[places + 1] == 3, -100))
            outside = torch.ones(len(row), dtype=torch.bool)
            outside[places + 1] = False
            inputs = batch["input_ids"][index, : len(row)]
            assert torch.equal(inputs[outside | (ids == 3)], ids[outside | (ids == 3)])
        assert not (batch["labels"][~batch["decoder_attention_mask"].bool()] != -100).any()


def small_model(**fields):
    torch.manual_seed(0)
    config = XFormerConfig(
        is_encoder_decoder=True, vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, pad_token_id=0, decoder_start_token_id=2, max_position_embeddings=32, **fields,
    )  # fmt: skip
    return XFormerForSeq2SeqLM(config).double().eval()


def test_decoders_read_their_places(bert_tokenizer):
    """Places of the whole decoder text change the prediction as learned positions do."""
    model = small_model()
    batch = build_objective("mass").collator(bert_tokenizer)([{"input_ids": [2, *range(5, 17), 3]}])
    logits = model(**batch).logits
    shifted = model(**(batch | {"decoder_position_ids": batch["decoder_position_ids"] + 3})).logits
    assert (logits - shifted).abs().max() > 1e-4
    counted = torch.arange(batch["labels"].shape[1])[None]
    plain = {name: value for name, value in batch.items() if name != "decoder_position_ids"}
    assert torch.equal(model(**plain).logits, model(**plain, decoder_position_ids=counted).logits)


def test_refusals(t5_tokenizer):
    with pytest.raises(ValueError, match="needs a ForSeq2SeqLM class"):
        check_objective(config_class("xf_bert"), "mass")
    with pytest.raises(ValueError, match="must not exceed 1"):
        MassObjective(random_prob=0.5)
    with pytest.raises(ValueError, match="no mask token"):
        MassObjective().collator(t5_tokenizer)
    encoder = XFormerModel(XFormerConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(ValueError, match="`decoder_position_ids` was given to a model without a second tower"):
        encoder(torch.ones(1, 2).long(), decoder_position_ids=torch.zeros(1, 2).long())
