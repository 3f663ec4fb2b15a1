"""Contrastive predictive coding of ETC: its batches, its vectors, its loss."""

from __future__ import annotations

import math

import pytest
import torch

from hf_xformers import XFormerConfig
from hf_xformers.data.sentences import document_rows
from hf_xformers.data.tokenizer import train_tokenizer
from hf_xformers.modeling.contrastive_prediction import XFormerForContrastivePrediction, contrastive_loss, told_apart
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.cpc_etc import apply_noise, sample_noise
from hf_xformers.variants.etc import XFETCConfig, XFETCForContrastivePrediction
from tests.helpers import NO_DROPOUT, tiny_fields

TEXTS = [
    "The cat sat on the mat. A dog barked at it loudly. Nobody cared about either. It rained all day long.",
    "One sentence stands here alone",
    "Snow fell on the hills. Birds flew over the sea! Was it cold there? The sun rose late.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 3, kind="wordpiece", vocab_size=120, num_sentinels=0, style="bert")


@pytest.fixture(scope="module")
def rows(tokenizer):
    from datasets import Dataset

    return list(document_rows(Dataset.from_dict({"text": TEXTS}), tokenizer, 64, 32, words=True))


def model(**fields) -> XFETCForContrastivePrediction:
    torch.manual_seed(0)
    sizes = tiny_fields(XFETCConfig, vocab_size=120, hidden_size=16, max_position_embeddings=64, **NO_DROPOUT)
    config = XFETCConfig(**{**sizes, "attention": {"type": "etc", "local_radius": 3}, **fields})
    return XFETCForContrastivePrediction(config).double().eval()


def test_golden_noise():
    ids, sentences = torch.tensor([7, 8, 3, 9, 3, 10, 11, 3]), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    assert apply_noise(ids, sentences, torch.tensor([1]), 4).tolist() == [7, 8, 3, 4, 4, 10, 11, 3]


def test_number_and_frequency_of_masked_sentences():
    for sentences, wanted in ((1, 0), (2, 1), (3, 1), (10, 2), (20, 3)):
        assert len(sample_noise(sentences, 0.15, torch.Generator().manual_seed(0))) == wanted
    generator, draws = torch.Generator().manual_seed(1), 4000
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[sample_noise(4, 0.5, generator)] += 1
    assert ((counts / draws - 0.5).abs() < 4 * math.sqrt(0.25 / draws)).all()


def test_batches(tokenizer, rows):
    """Masked sentences hold nothing but masks and no target; elsewhere whole words are targets."""
    collator = build_objective({"type": "cpc_etc", "mask_prob": 0.4}).collator(tokenizer)
    batch = collator(rows)
    mask, end = tokenizer.mask_token_id, tokenizer.sep_token_id
    assert (batch["masked_sentences"][1] == -1).all()  # a single sentence stays
    for number, row in enumerate(rows):
        ids, sentences = torch.tensor(row["input_ids"]), torch.tensor(row["sentence_ids"])
        length = len(ids)
        inputs, labels = batch["input_ids"][number, :length], batch["labels"][number, :length]
        assert torch.equal(batch["sentence_ids"][number, :length], sentences)
        assert (batch["sentence_ids"][number, length:] == -1).all()
        masked = batch["masked_sentences"][number]
        masked = masked[masked >= 0]
        inside = torch.isin(sentences, masked)
        assert (inputs[inside] == mask).all() and (labels[inside] == -100).all()
        for place, sentence in enumerate(masked.tolist()):
            real = batch["sentence_attention_mask"][number, place].bool()
            assert torch.equal(batch["sentence_input_ids"][number, place][real], ids[sentences == sentence])
        target = labels != -100
        assert target.any() and (labels[target] == ids[target]).all() and (ids[target] != end).all()
        assert torch.equal(inputs[~target & ~inside], ids[~target & ~inside])
        words = torch.tensor(row["word_ids"])
        for sentence in sentences.unique():
            for word in words[words >= 0].unique():
                assert target[(sentences == sentence) & (words == word)].unique().numel() <= 1
    alone = collator([rows[2]])
    width = len(rows[2]["input_ids"])
    assert torch.equal(alone["input_ids"][0], batch["input_ids"][2, :width])
    assert torch.equal(
        alone["masked_sentences"][0], batch["masked_sentences"][2, : alone["masked_sentences"].shape[1]]
    )


@torch.no_grad()
def test_what_vectors_know(tokenizer, rows):
    """a_i nothing of the tokens of its own sentence, b_i nothing but them."""
    net = model()
    batch = build_objective("cpc_etc").collator(tokenizer)(rows)

    def vectors(batch):
        base = net.model(batch["input_ids"], batch["attention_mask"], sentence_ids=batch["sentence_ids"])
        return net.vectors(
            base.summaries,
            batch["masked_sentences"],
            batch["sentence_input_ids"],
            batch["sentence_attention_mask"],
        )

    a, b, there, _ = vectors(batch)
    assert there.tolist() == [True, False, True]
    own = {**batch, "sentence_input_ids": torch.where(batch["sentence_attention_mask"] == 1, 60, 0)}
    changed_a, changed_b, *_ = vectors(own)
    torch.testing.assert_close(changed_a, a)
    assert (changed_b - b)[there].abs().amax(-1).gt(1e-4).all()
    inside = torch.stack([torch.isin(s, m) for s, m in zip(batch["sentence_ids"], batch["masked_sentences"])])
    others = torch.where(inside | (batch["attention_mask"] == 0), batch["input_ids"], 61)
    changed_a, changed_b, *_ = vectors({**batch, "input_ids": others})
    torch.testing.assert_close(changed_b, b)
    assert (changed_a - a)[there].abs().amax(-1).gt(1e-4).all()
    # By themselves: the sentence as the only text there is.
    for row in (0, 2):
        ids = batch["sentence_input_ids"][row, 0][batch["sentence_attention_mask"][row, 0].bool()][None]
        single = net.model(ids, sentence_ids=torch.zeros_like(ids)).summaries[0, 0]
        torch.testing.assert_close(b[row], single)


def test_sentences_alone_are_regularized(tokenizer, rows):
    net, batch = model(feedforward="switch"), build_objective("cpc_etc").collator(tokenizer)(rows)
    with torch.no_grad():
        base = net.model(batch["input_ids"], batch["attention_mask"], sentence_ids=batch["sentence_ids"])
        sentences = [batch[name] for name in ("masked_sentences", "sentence_input_ids", "sentence_attention_mask")]
        more = net.vectors(base.summaries, *sentences)[-1]
        found = net(**batch).aux_losses["router_balance"]
    assert more["router_balance"] > 0
    torch.testing.assert_close(found, base.aux_losses["router_balance"] + more["router_balance"])


def test_loss_equals_its_equation():
    torch.manual_seed(0)
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    there = torch.tensor([True, True, False, True])
    total = 0.0
    for i in (0, 1, 3):
        scores = {j: sum(x * y for x, y in zip(a[i].tolist(), b[j].tolist())) / math.sqrt(6) for j in (0, 1, 3)}
        total += -scores[i] + math.log(sum(math.exp(s) for s in scores.values()))

    def loss(anchors, candidates, there):
        return contrastive_loss(told_apart(anchors, candidates, there), there)

    assert loss(a, b, there).item() == pytest.approx(total / 3, abs=1e-12)
    equal = torch.ones(5, 6)
    assert loss(equal, equal, torch.ones(5, dtype=torch.bool)).item() == pytest.approx(math.log(5))
    none = loss(equal.requires_grad_(), equal, torch.zeros(5, dtype=torch.bool))
    none.backward()
    assert none.item() == 0 and equal.grad.eq(0).all()


@torch.no_grad()
def test_scores_say_which_sentence_is_meant(tokenizer, rows):
    """Among the masked sentences of the batch, in their order; a row without any has no target."""
    net = model()
    batch = build_objective("cpc_etc").collator(tokenizer)(rows)
    output = net(**batch)
    assert output.sentence_targets.tolist() == [[0], [-100], [2]]
    base = net.model(batch["input_ids"], batch["attention_mask"], sentence_ids=batch["sentence_ids"])
    places = batch["masked_sentences"]
    a, b, *_ = net.vectors(base.summaries, places, batch["sentence_input_ids"], batch["sentence_attention_mask"])
    scores = output.sentence_logits[:, 0]
    for i, j in ((0, 0), (0, 2), (2, 0), (2, 2)):
        torch.testing.assert_close(scores[i, j], (a[i] * b[j]).sum() / 4)  # sqrt of width 16
    assert (scores[:, 1] < -1e30).all()
    alone = net(**build_objective("cpc_etc").collator(tokenizer)(rows[:1]))
    assert alone.sentence_targets.tolist() == [[-100]]  # nothing to be told apart from


def test_the_head_adds_both_losses(tokenizer, rows):
    net = model(pretraining={"contrastive_prediction": {"weight": 0.5}})
    batch = build_objective("cpc_etc").collator(tokenizer)(rows)
    output = net.train()(**batch)
    plain = {name: value for name, value in batch.items() if not name.startswith(("masked_", "sentence_input"))}
    plain.pop("sentence_attention_mask")
    mlm = net(**plain).loss
    torch.testing.assert_close(output.loss, mlm + output.aux_losses["cpc"])
    output.loss.backward()
    assert all(p.grad is not None for p in net.parameters())
    counted = net(**batch, num_items_in_batch=100).loss
    torch.testing.assert_close(counted, output.loss * (batch["labels"] != -100).sum() / 100)


def test_refusals(tokenizer):
    with pytest.raises(ValueError, match="Use xf_etc"):
        XFormerForContrastivePrediction(XFormerConfig(num_hidden_layers=1, hidden_size=12))
    collator = build_objective("cpc_etc").collator(tokenizer)
    with pytest.raises(ValueError, match="sentence_ids"):
        collator([{"input_ids": [5, 6], "word_ids": [0, 1]}])
