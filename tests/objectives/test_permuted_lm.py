"""Permuted language modelling: masks against golden rows, spans and their share, batches, what is refused."""

import math

import pytest
import torch

from hf_xformers import XFXLNetConfig, XFXLNetForMaskedLM
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.permuted_lm import OrderNoise, apply_noise, hidden_pairs, sample_noise
from hf_xformers.training.building import build_config, refuse_other_component
from hf_xformers.variants import config_class
from tests.helpers import NO_DROPOUT, close, make_strong, tokens


def sees(order, targets=None, special=None, middle=0):
    nothing = torch.zeros(len(order), dtype=torch.bool)
    targets = ~nothing if targets is None else torch.tensor(targets).bool()
    special = nothing if special is None else torch.tensor(special).bool()
    return (~hidden_pairs(torch.tensor(order), targets, special, middle)).long().tolist()


def test_golden():
    """What queries may read; the content stream adds the token itself."""
    assert sees([2, 0, 3, 1]) == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1], [0, 1, 0, 0]]
    assert sees([0, 1, 2, 3]) == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    # Tokens 0 and 3 are there from the start and see no target; token 4 is special, and third in the order.
    found = sees([0, 1, 3, 4, 2], targets=[0, 1, 1, 0, 0], special=[0, 0, 0, 0, 1])
    assert found == [[1, 0, 0, 1, 0], [1, 0, 0, 1, 0], [1, 1, 0, 1, 1], [1, 0, 0, 1, 0], [1, 1, 0, 1, 1]]
    # Two parts: the first sees nothing of the second, the second all of the first.
    assert sees([1, 0, 3, 2], middle=2) == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1], [1, 1, 0, 0]]


def test_reversal_keeps_special_tokens():
    special = torch.tensor([1, 0, 0, 0, 1]).bool()
    noise = OrderNoise(torch.tensor([0, 1, 0, 0, 0]).bool(), torch.arange(5), True)
    ids, _, places = apply_noise(torch.tensor([2, 5, 6, 7, 3]), noise, special, 0)
    assert ids.tolist() == [2, 7, 6, 5, 3] and places.tolist() == [1]


def test_reversal_keeps_separators_between_documents(bert_tokenizer):
    """A row of several documents from its end: the last one first, and each apart from its neighbours."""
    collate = build_objective("permuted_lm").collator(bert_tokenizer)
    documents, seen = ([10, 11, 12], [20, 21, 22, 23, 24, 25, 26], [30, 31]), set()
    for number in range(40):  # another number, another draw
        texts = [[40 + number % 8], *documents, [30 + number % 20, 49]]
        row = [2, *(token for text in texts for token in (*text, 3))]
        batch = collate([{"input_ids": row}])
        backward = [2, *(token for text in texts[::-1] for token in (*text[::-1], 3))]
        ids, real = batch["input_ids"][0].tolist(), batch["labels"][0] != -100
        assert ids in (row, backward)
        seen.add(ids == row)
        targets = batch["target_mapping"][0][real].argmax(-1)
        assert batch["labels"][0][real].tolist() == batch["input_ids"][0][targets].tolist()
        assert not {2, 3} & set(batch["labels"][0].tolist())
    assert seen == {True, False}


def test_whole_words_of_reversed_rows(bert_tokenizer):
    """As many words are targets in part as in rows that are read from their beginning, where single tokens fill the
    budget."""
    whole = build_objective({"type": "permuted_lm", "whole_word": True, "max_gram": 2, "mask_alpha": 4})
    collate, broken = whole.collator(bert_tokenizer), {True: 0, False: 0}
    for number in range(200):
        lengths = ([12, 13], [14, 15, 16], [17], [18, 19], [20, 21, 22, 23])
        words = [[5 + number % 7], *lengths, [24 + number % 29, 25]] * 3
        row = [token for word in words for token in word]
        numbers = [index for index, word in enumerate(words) for _ in word]
        batch = collate([{"input_ids": row, "word_ids": numbers}])
        backward = batch["input_ids"][0].tolist() != row
        places = batch["target_mapping"][0].argmax(-1)[batch["labels"][0] != -100].tolist()
        found = {len(row) - 1 - place if backward else place for place in places}
        for index in set(numbers):
            own = {place for place, word in enumerate(numbers) if word == index}
            broken[backward] += 0 < len(own & found) < len(own)
    assert broken[True] < 1.3 * broken[False] + 10, broken


def test_spans_and_orders():
    """One token in six is a target, half of the rows are reversed, spans have p(l) ~ 1 / l, orders stay in blocks."""
    objective, runs, length = build_objective({"type": "permuted_lm", "perm_size": 16}), 300, 64
    special = torch.zeros(length, dtype=torch.bool)
    special[[0, length - 1]] = True
    reversed_rows, at_the_beginning, firsts = 0, 0, []
    for seed in range(runs):
        noise = sample_noise(special, objective, torch.Generator().manual_seed(seed))
        assert int(noise.targets.sum()) == 10 and not noise.targets[special].any()
        reversed_rows += noise.reverse
        for begin in range(0, length, 16):
            assert sorted(noise.order[begin : begin + 16].tolist()) == list(range(begin, begin + 16))
        free = build_objective({"type": "permuted_lm", "reuse_len": 0, "num_predict": 20})
        chosen = sample_noise(
            torch.zeros(512, dtype=torch.bool), free, torch.Generator().manual_seed(seed)
        ).targets.tolist()
        start = chosen.index(True)
        at_the_beginning += start == 0
        firsts.append(chosen[start:].index(False))
    # The first span begins in one of 6 l places, the first token among them.
    share = sum(60 / 137 / size / (6 * size) for size in range(1, 6))
    assert abs(at_the_beginning / runs - share) < 4 * math.sqrt(share * (1 - share) / runs)
    assert abs(reversed_rows / runs - 0.5) < 4 * math.sqrt(0.25 / runs)
    # The first span is now and then lengthened by a neighbour; its law is that of the paper otherwise.
    assert abs(sum(size == 1 for size in firsts) / runs - 60 / 137) < 4 * math.sqrt(0.25 / runs)
    whole = build_objective({"type": "permuted_lm", "whole_word": True, "max_gram": 1, "mask_alpha": 4})
    words = torch.arange(length) // 2
    noise = sample_noise(torch.zeros(length, dtype=torch.bool), whole, torch.Generator().manual_seed(0), words)
    pairs = noise.targets.view(-1, 2)
    assert (pairs[:, 0] == pairs[:, 1]).float().mean() > 0.9
    tiny = sample_noise(torch.tensor([True, False]), objective, torch.Generator())
    assert tiny.targets.tolist() == [False, True]
    assert not sample_noise(torch.tensor([True]), objective, torch.Generator()).targets.any()


@pytest.mark.parametrize(("length", "reuse"), [(512, None), (510, 128), (101, 7)])
def test_parts_have_the_targets_of_a_row(length, reuse):
    """85 of 512 are 42 in the first half and 43 in the second."""
    objective = build_objective({"type": "permuted_lm", "num_predict": 85, "reuse_len": reuse, "max_gram": 2})
    noise = sample_noise(torch.zeros(length, dtype=torch.bool), objective, torch.Generator().manual_seed(0))
    assert int(noise.targets.sum()) == 85


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    bert_tokenizer.padding_side = side
    rows = [[2, *range(5, 35), 3], [2, 30, 31, 32, 3], [2, 3]]
    collate = build_objective({"type": "permuted_lm", "bi_data": False}).collator(bert_tokenizer)
    batch = collate([{"input_ids": row} for row in rows])
    for index, row in enumerate(rows):
        real = batch["attention_mask"][index].bool()
        alone = collate([{"input_ids": row}])
        assert batch["input_ids"][index][real].tolist() == row
        assert torch.equal(batch["perm_mask"][index][real][:, real], alone["perm_mask"][0])
        mapping, labels = batch["target_mapping"][index], batch["labels"][index]
        marked = mapping.sum(-1).bool()
        assert torch.equal(marked, labels != -100) and int(marked.sum()) == int(alone["target_mapping"].sum())
        assert labels[marked].tolist() == batch["input_ids"][index][mapping[marked].argmax(-1)].tolist()
        assert not set(labels[marked].tolist()) & {0, 1, 2, 3, 4}
    bert_tokenizer.padding_side = "right"


def test_rows_without_a_word(bert_tokenizer):
    """A batch of special tokens alone has nothing to predict, and a loss of zero."""
    batch = build_objective("permuted_lm").collator(bert_tokenizer)([{"input_ids": [2, 3]}, {"input_ids": [2]}])
    assert (batch["labels"] == -100).all() and not batch["target_mapping"].any()
    so_many = build_objective({"type": "permuted_lm", "num_predict": 2}).collator(bert_tokenizer)
    assert so_many([{"input_ids": []}])["labels"].tolist() == [[-100]]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = XFXLNetForMaskedLM(XFXLNetConfig(vocab_size=60, **sizes))
    loss = model(**batch).loss
    loss.backward()
    assert loss == 0 and all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())


def test_a_target_sees_what_the_order_allows(bert_tokenizer):
    """No logit depends on its own token or on later ones of the order."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    model = make_strong(XFXLNetForMaskedLM(XFXLNetConfig(**sizes, **NO_DROPOUT))).double().eval()
    row = [2, *tokens(14, low=5, high=45).tolist(), 3]
    collate = build_objective({"type": "permuted_lm", "bi_data": False, "mask_alpha": 3}).collator(bert_tokenizer)
    batch = collate([{"input_ids": row}])
    batch["target_mapping"] = batch["target_mapping"].double()
    hidden, places = batch["perm_mask"][0], batch["target_mapping"][0].argmax(-1)
    with torch.no_grad():
        before = model(**batch).logits[0]
        for place in range(1, 15):
            ids = batch["input_ids"].clone()
            ids[0, place] = 46
            after = model(**{**batch, "input_ids": ids}).logits[0]
            for target, found, expected in zip(places.tolist(), after, before, strict=True):
                if hidden[target, place]:
                    close(found, expected, 0.0)
                elif target != place:
                    assert (found - expected).abs().max() > 0


def test_refusals():
    objective = build_objective("permuted_lm")
    with pytest.raises(ValueError, match="needs stack 'two_stream', and 'xf_bert' has 'plain'; take variant xf_xlnet"):
        refuse_other_component(build_config(config_class("xf_bert"), "tiny", objective), objective)
    refuse_other_component(build_config(config_class("xf_xlnet"), "tiny", objective), objective)
    for fields, message in (
        ({"perm_size": 9, "reuse_len": 8}, "perm_size 9 must not exceed reuse_len 8"),
        ({"mask_alpha": 1, "mask_beta": 2}, "mask_beta 2 of mask_alpha 1"),
    ):
        with pytest.raises(ValueError, match=message):
            build_objective({"type": "permuted_lm", **fields})
