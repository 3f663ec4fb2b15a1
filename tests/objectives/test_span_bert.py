"""SpanBERT: the law of lengths, exact budgets, golden pairs, the boundary head by hand, parameters, refusals."""

import dataclasses
import math

import pytest
import torch

from hf_xformers import XFSpanBertConfig, XFSpanBertForSpanBoundary, XFSpanBertModel
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.span_bert import SpanBertObjective, boundary_targets, length_law, sample_noise
from hf_xformers.training.building import build_config, check_objective
from hf_xformers.variants import config_class
from tests.helpers import close, make_strong

VOCABULARY = torch.arange(5, 40)
SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
NARROW = {"span_boundary": {"place_width": 6}}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_law_of_lengths():
    expected = [0.2241, 0.1792, 0.1434, 0.1147, 0.0918, 0.0734, 0.0587, 0.0470, 0.0376, 0.0301]
    law = length_law(0.2, 1, 10)
    assert [round(float(share), 4) for share in law] == expected
    assert abs(float((law * torch.arange(1, 11)).sum()) - 3.797) < 1e-3


def test_spans():
    """The budget is met exactly, spans begin with a word and stay within the text's parts, one fate for each span."""
    spec, draw = SpanBertObjective(), generator()
    whole, fates = 0, []
    for _ in range(120):
        sizes = torch.randint(1, 4, (20,), generator=draw)
        words = torch.arange(20).repeat_interleave(sizes)
        words = torch.cat([torch.tensor([-1]), words[: len(words) // 2], torch.tensor([-1]), words[len(words) // 2 :]])
        noise = sample_noise(words, spec, VOCABULARY, draw)
        assert sum(stop - start for start, stop in noise.spans) == math.ceil(0.15 * int((words >= 0).sum()))
        for start, stop in noise.spans:
            assert words[start] != words[start - 1] and (words[start:stop] >= 0).all()
            assert len(set(noise.action[start:stop].tolist())) == 1
            fates.append(int(noise.action[start]))
            whole += int(stop == len(words) or words[stop] != words[stop - 1])
        assert all(one[1] < two[0] for one, two in zip(noise.spans, noise.spans[1:]))
    for fate, share in ((0, 0.1), (1, 0.8), (2, 0.1)):
        assert abs(fates.count(fate) - share * len(fates)) < 4 * math.sqrt(len(fates) * share * (1 - share))
    assert whole > len(fates) / 2  # only the last span of a row may end within a word
    tokens = SpanBertObjective(replacement="token", mask_prob=0.9)
    assert len(set(sample_noise(torch.arange(50), tokens, VOCABULARY, draw).action.tolist())) == 3
    assert sample_noise(torch.full((3,), -1), spec, VOCABULARY, draw).spans == []


def test_golden_pairs():
    around, numbers = boundary_targets([(2, 5), (7, 8)], 0, 9, 20)
    assert around.tolist() == [[1, 5]] * 3 + [[6, 8]] and numbers.tolist() == [0, 1, 2, 0]
    around, numbers = boundary_targets([(0, 2), (5, 8), (9, 10)], 0, 9, 2)
    assert around.tolist() == [[4, 8]] * 2 and numbers.tolist() == [0, 1]
    assert boundary_targets([], 0, 9, 2)[0].shape == (0, 2)


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    bert_tokenizer.padding_side = side
    rows = [[2, *range(5, 35), 3], [2, 30, 31, 32, 33, 3], [2, 3]]
    features = [{"input_ids": row, "word_ids": [-1, *range(len(row) - 2), -1]} for row in rows]
    collator = build_objective("span_bert").collator(bert_tokenizer)
    seen = 0
    for epoch in range(8):
        collator.set_epoch(epoch)
        batch = collator(features)
        whole = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        assert (batch["span_target_places"][batch["span_labels"] == -100] == 0).all()
        for index, row in enumerate(rows):
            assert whole[index][batch["attention_mask"][index].bool()].tolist() == row
            known = batch["span_labels"][index] != -100
            around = batch["span_boundaries"][index][known]
            places = around[:, 0] + 1 + batch["span_target_places"][index][known]
            assert torch.equal(whole[index][places], batch["span_labels"][index][known])
            assert (batch["labels"][index][places] != -100).all() and (places < around[:, 1]).all()
            assert (batch["labels"][index][around] == -100).all()
            seen += int(known.sum())
    assert seen > 20
    bert_tokenizer.padding_side = "right"


@torch.no_grad()
def test_boundary_head_by_hand():
    torch.manual_seed(0)
    model = make_strong(XFSpanBertForSpanBoundary(XFSpanBertConfig(**SIZES, pretraining=NARROW)).double().eval())
    ids = torch.randint(5, 50, (2, 9), generator=generator())
    around = torch.tensor([[[1, 4], [1, 4]], [[2, 6], [0, 0]]])
    places, targets = torch.tensor([[0, 1], [2, 0]]), torch.tensor([[7, 8], [9, -100]])
    given = {"span_boundaries": around, "span_target_places": places, "span_labels": targets}
    labels = torch.full_like(ids, -100)
    labels[0, 2] = 7
    output = model(ids, labels=labels, **given)
    states = model.model(ids).last_hidden_state
    head, weights = model.boundary_head, dict(model.boundary_head.named_parameters())

    def normed(x, name):
        x = (x - x.mean()) / (x.var(unbiased=False) + 1e-12).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x):
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))

    total = 0.0
    for row, number in ((0, 0), (0, 1), (1, 0)):
        left, right = around[row, number].tolist()
        place = weights["places.weight"][places[row, number]]
        hidden = torch.cat([states[row, left], states[row, right], place])
        hidden = normed(gelu(weights["dense_in.weight"] @ hidden + weights["dense_in.bias"]), "norm_in")
        hidden = normed(gelu(weights["dense_out.weight"] @ hidden + weights["dense_out.bias"]), "norm_out")
        logits = model.get_input_embeddings().weight @ hidden + weights["decoder.bias"]
        close(output.span_logits[row, number], logits)
        total -= float(logits.log_softmax(-1)[targets[row, number]])
    close(output.aux_losses["span_boundary"], torch.tensor(total / 3, dtype=torch.float64))
    masked = model(ids, labels=labels)
    close(output.loss, masked.loss + total / 3)
    model.settings = dataclasses.replace(model.settings, weight=0)
    close(model(ids, labels=labels, **given).loss, masked.loss)
    model.resize_token_embeddings(60)
    assert model(ids, **given).span_logits.shape == (2, 2, 60)
    assert head is model.boundary_head and head.decoder.weight is model.get_input_embeddings().weight


def test_the_inside_of_a_span_tells_nothing():
    model = XFSpanBertForSpanBoundary(XFSpanBertConfig(**SIZES)).eval()
    states = torch.randn(1, 8, 16, requires_grad=True)
    logits = model._from_boundaries(states, torch.tensor([[[2, 5]]]), torch.tensor([[1]]))
    logits.square().sum().backward()
    moved = states.grad.abs().sum(-1)[0] > 0
    assert moved.tolist() == [place in (2, 5) for place in range(8)]


@pytest.mark.parametrize(("size", "parameters"), [("base", 108_310_272), ("large", 333_579_264)])
def test_published_sizes(size, parameters):
    """As many as the released cased models have, which are BERT's."""
    config = build_config(config_class("xf_span_bert"), size, build_objective("span_bert"))
    config.vocab_size = 28996
    with torch.device("meta"):
        assert XFSpanBertModel(config).num_parameters() == parameters


def test_refusals():
    with pytest.raises(ValueError, match="span_bert.*needs a ForSpanBoundary class.*xf_span_bert"):
        check_objective(config_class("xf_bert"), "span_bert")
    for settings, message in (
        ({"span_min": 3, "span_max": 2}, "spans of 3 to 2 words"),
        ({"max_pair_targets": 5}, "max_pair_targets=5 is less"),
    ):
        with pytest.raises(ValueError, match=message):
            SpanBertObjective(**settings)
