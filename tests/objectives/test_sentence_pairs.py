"""NSP and SOP: layout, where the segments come from, label rates, determinism, the label beside a masked LM."""

import math
from collections import Counter

import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from hf_xformers.objectives import (
    MaskedLMObjective,
    NextSentenceObjective,
    SentenceOrderObjective,
    build_objective,
    sentence_pairs,
)
from hf_xformers.objectives.sentence_pairs import PairPlan, Segment, apply_noise, sample_noise

CLS, SEP = 2, 3


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def corpus(count=12, sentences=20, seed=0):
    """Documents of unique ids: token = 1000 * document + position in the document + 10. Sentences of 1 to 9 tokens."""
    draw, documents = generator(seed), []
    for number in range(count):
        sizes = torch.randint(1, 10, (sentences,), generator=draw).tolist()
        ids, at = [], 1000 * number + 10
        for size in sizes:
            ids.append(list(range(at, at + size)))
            at += size
        documents.append(ids)
    return documents


def plans_of(documents, objective, seed=0):
    draw = generator(seed)

    def lengths(number):
        return [len(sentence) for sentence in documents[number]]

    return [
        plan
        for number in range(len(documents))
        for plan in sample_noise(number, lengths, len(documents), objective, draw)
    ]


def split(row):
    """A and B of a row, checked against its layout."""
    ids, types = row["input_ids"], row["token_type_ids"]
    assert ids[0] == CLS and ids[-1] == SEP
    middle = ids.index(SEP)
    a, b = ids[1:middle], ids[middle + 1 : -1]
    assert SEP not in b and len(a) >= 1 and len(b) >= 1
    assert types == [0] * (len(a) + 2) + [1] * (len(b) + 1)
    assert row["special_tokens_mask"] == [int(token in (CLS, SEP)) for token in ids]
    return a, b


def test_golden_row():
    documents = [[[10, 11], [12], [13, 14, 15]], [[20, 21], [22, 23]]]
    plan = PairPlan(Segment(0, 0, 2, front=1), Segment(1, 0, 2, back=1), 1)
    row = apply_noise(plan, documents.__getitem__, CLS, SEP)
    assert row == {
        "input_ids": [2, 11, 12, 3, 20, 21, 22, 3],
        "token_type_ids": [0, 0, 0, 0, 1, 1, 1, 1],
        "special_tokens_mask": [1, 0, 0, 1, 0, 0, 0, 1],
        "next_sentence_label": 1,
    }


@pytest.mark.parametrize("length", [5, 16, 33, 64])
@pytest.mark.parametrize("name", ["nsp", "sop"])
def test_rows_fit_and_come_from_where_the_label_says(name, length):
    """Label 0: B goes on where A ends (truncation may cut the seam). NSP label 1: B from another one."""
    documents = corpus()
    objective = build_objective({"type": name, "max_seq_length": length})
    plans = plans_of(documents, objective)
    assert {plan.label for plan in plans} == {0, 1} or length == 5
    for plan in plans:
        row = apply_noise(plan, documents.__getitem__, CLS, SEP)
        a, b = split(row)
        assert len(row["input_ids"]) <= length
        assert a == list(range(a[0], a[0] + len(a))) and b == list(range(b[0], b[0] + len(b)))  # runs of the source
        same_document = a[0] // 1000 == b[0] // 1000
        first, second = (plan.b, plan.a) if name == "sop" and plan.label == 1 else (plan.a, plan.b)
        if name == "nsp" and plan.label == 1:
            assert not same_document
        else:
            assert same_document and first.stop == second.start and first.document == second.document
            assert (a[-1] < b[0]) == (plan.label == 0)


def test_nsp_gives_unused_sentences_back():
    """A segments with label 1 and whole chunks with label 0 together cover every sentence exactly once."""
    documents = corpus()
    objective = NextSentenceObjective(max_seq_length=40)
    used = Counter()
    for plan in plans_of(documents, objective):
        for segment in (plan.a,) if plan.label else (plan.a, plan.b):
            used.update((segment.document, index) for index in range(segment.start, segment.stop))
    assert used == Counter((d, s) for d in range(len(documents)) for s in range(len(documents[d])))


def test_sop_drops_only_single_sentence_chunks():
    documents = corpus()
    objective = SentenceOrderObjective(max_seq_length=20)
    used = Counter()
    for plan in plans_of(documents, objective):
        for segment in (plan.a, plan.b):
            used.update((segment.document, index) for index in range(segment.start, segment.stop))
    assert set(used.values()) == {1}
    assert sum(used.values()) > 0.7 * 12 * 20
    long_sentences = [[list(range(30)) for _ in range(5)]]
    assert plans_of(long_sentences, objective) == []


@pytest.mark.parametrize("probability", [0.5, 0.2])
def test_label_rates(probability):
    """The Bernoulli rate when all chunks have at least two sentences; NSP: more where a document ends with one."""
    documents = [[[5]] * 40] * 60
    sop = plans_of(documents, SentenceOrderObjective(max_seq_length=9, swap_prob=probability, short_seq_prob=0.0))
    ones, n = sum(plan.label for plan in sop), len(sop)
    assert n > 300 and abs(ones - probability * n) < 4 * math.sqrt(n * probability * (1 - probability))
    # For NSP a document may end in a chunk of one sentence; the others have the Bernoulli rate.
    nsp = plans_of(documents, NextSentenceObjective(max_seq_length=9, random_prob=probability, short_seq_prob=0.0))
    forced = [plan for plan in nsp if plan.a.start == 39]
    free = [plan for plan in nsp if plan.a.start < 39]
    ones, n = sum(plan.label for plan in free), len(free)
    assert abs(ones - probability * n) < 4 * math.sqrt(n * probability * (1 - probability))
    assert all(plan.label == 1 for plan in forced) and forced


def test_single_sentence_documents_are_always_random_in_nsp():
    plans = plans_of([[[number] * 5] for number in range(30)], NextSentenceObjective())
    assert len(plans) == 30 and all(plan.label == 1 for plan in plans)


def test_random_document_is_uniform_over_the_others():
    documents = [[[5, 6]] for _ in range(6)]
    draw = generator()
    hits = Counter()
    for _ in range(3000):
        (plan,) = sample_noise(2, lambda number: [2], 6, NextSentenceObjective(), draw)
        hits[plan.b.document] += 1
    assert set(hits) == {0, 1, 3, 4, 5}
    assert all(abs(count - 600) < 4 * math.sqrt(3000 * 0.2 * 0.8) for count in hits.values())
    assert len(documents) == 6


def test_random_segment_fills_the_row():
    """With sentences of one token a random B has exactly the tokens that A leaves, unless its document ends first."""
    documents = [[[5]] * 50] * 10
    full = 0
    for plan in plans_of(documents, NextSentenceObjective(max_seq_length=23, random_prob=1.0, short_seq_prob=0.0)):
        total = plan.a.stop - plan.a.start + plan.b.stop - plan.b.start
        assert total == 20 or (total < 20 and plan.b.stop == 50)
        full += total == 20
    assert full > 10


def test_sop_swap_flips_the_label_and_keeps_the_tokens():
    """The same draws with swap_prob 0 and 1 give the same two segments in either order."""
    documents = corpus()
    for length in (12, 40):
        straight = plans_of(documents, SentenceOrderObjective(max_seq_length=length, swap_prob=0.0))
        swapped = plans_of(documents, SentenceOrderObjective(max_seq_length=length, swap_prob=1.0))
        assert len(straight) == len(swapped) > 10
        for one, two in zip(straight, swapped):
            assert (one.label, two.label) == (0, 1) and (one.a, one.b) == (two.b, two.a)


def test_truncation_takes_from_the_longer_part_at_both_ends():
    documents = [[list(range(100)), list(range(100, 140))]]
    fronts = backs = 0
    for seed in range(40):
        plans = plans_of(documents, SentenceOrderObjective(max_seq_length=83, swap_prob=0.0, short_seq_prob=0.0), seed)
        assert plans == []  # the first sentence alone fills the chunk
    documents = [[list(range(30)), list(range(30, 130))]]
    for seed in range(40):
        (plan,) = plans_of(
            documents, SentenceOrderObjective(max_seq_length=83, swap_prob=0.0, short_seq_prob=0.0), seed
        )
        assert (plan.a.front, plan.a.back) == (0, 0)  # B is the longer part until the end
        assert plan.b.front + plan.b.back == 50
        fronts, backs = fronts + plan.b.front, backs + plan.b.back
    assert abs(fronts - 1000) < 4 * math.sqrt(2000 * 0.25)
    assert fronts + backs == 2000


def test_short_sequences():
    """With short_seq_prob 1 the target length of a document is uniform in 2..max - 3."""
    documents = [[[5]] * 200] * 40
    plans = plans_of(documents, SentenceOrderObjective(max_seq_length=32, short_seq_prob=1.0))
    sizes = {plan.a.document: 0 for plan in plans}
    for plan in plans:
        total = plan.a.stop - plan.a.start + plan.b.stop - plan.b.start
        sizes[plan.a.document] = max(sizes[plan.a.document], total)
    assert min(sizes.values()) >= 2 and max(sizes.values()) <= 29 and len(set(sizes.values())) > 12
    full = plans_of(documents, SentenceOrderObjective(max_seq_length=32, short_seq_prob=0.0))
    assert {plan.a.stop - plan.a.start + plan.b.stop - plan.b.start for plan in full} <= {29, 200 % 29}


# --- data sets ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts():
    draw = generator(5)
    documents = []
    for _ in range(8):
        documents.append([])
        for _ in range(10):
            size = max(0, int(torch.randint(-3, 8, (), generator=draw)))  # often one word alone
            words = torch.randint(40, (size,), generator=draw).tolist()
            documents[-1].append(" ".join(f"w{word}" for word in words) + " unbelievable")
    return Dataset.from_dict({"sentences": [*documents, [], [""]], "title": ["t"] * 10})


@pytest.mark.parametrize("name", ["nsp", "sop"])
def test_dataset_of_texts(bert_tokenizer, texts, name):
    objective = build_objective({"type": name, "max_seq_length": 48})
    pairs = sentence_pairs(texts, bert_tokenizer, objective, seed=1)
    assert set(pairs.column_names) == {
        "input_ids", "token_type_ids", "special_tokens_mask", "next_sentence_label", "unit_ids",
    }  # fmt: skip
    assert len(pairs) >= 8
    for row in pairs:
        split(row)
        assert [unit < 0 for unit in row["unit_ids"]] == [bool(mark) for mark in row["special_tokens_mask"]]
        words = bert_tokenizer.convert_ids_to_tokens(row["input_ids"])
        for index in range(1, len(words)):  # pieces share the unit of the word they continue, words do not
            together = row["unit_ids"][index] == row["unit_ids"][index - 1]
            assert together == words[index].startswith("##") or words[index - 1] in ("[CLS]", "[SEP]")


def test_dataset_depends_on_seed_and_epoch_only(bert_tokenizer, texts):
    objective = NextSentenceObjective(max_seq_length=48)
    base = sentence_pairs(texts, bert_tokenizer, objective, seed=1).to_dict()
    assert sentence_pairs(texts, bert_tokenizer, objective, seed=1, num_proc=2).to_dict() == base
    assert sentence_pairs(texts, bert_tokenizer, objective, seed=1, epoch=1).to_dict() != base
    assert sentence_pairs(texts, bert_tokenizer, objective, seed=2).to_dict() != base


def test_dataset_of_ids(bert_tokenizer):
    documents = Dataset.from_dict({"ids": corpus(4)})
    pairs = sentence_pairs(documents, bert_tokenizer, SentenceOrderObjective(max_seq_length=40), column="ids")
    assert "unit_ids" not in pairs.column_names
    for row in pairs:
        a, b = split(row)
        assert (a[0] < b[0]) == (row["next_sentence_label"] == 0)


def test_dataset_refusals(bert_tokenizer, gpt_tokenizer, texts):
    with pytest.raises(ValueError, match="no cls token"):
        sentence_pairs(texts, gpt_tokenizer, NextSentenceObjective())
    with pytest.raises(ValueError, match=r"no column 'text'.*sentences"):
        sentence_pairs(texts, bert_tokenizer, NextSentenceObjective(), column="text")
    with pytest.raises(ValueError, match="at least 2"):
        sentence_pairs(texts.select([0]), bert_tokenizer, NextSentenceObjective())
    with pytest.raises(ValueError, match="no document gives a pair"):
        sentence_pairs(Dataset.from_dict({"sentences": [["w1 w2"]]}), bert_tokenizer, SentenceOrderObjective())


# --- collator -------------------------------------------------------------------------------------------------------


def test_collator_alone(bert_tokenizer, texts):
    objective = NextSentenceObjective(max_seq_length=48)
    pairs = sentence_pairs(texts, bert_tokenizer, objective)
    batch = objective.collator(bert_tokenizer)([pairs[0], pairs[1], pairs[2]])
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert batch["labels"].tolist() == pairs["next_sentence_label"][:3]
    n = len(pairs[1]["input_ids"])
    assert batch["input_ids"][1, :n].tolist() == pairs[1]["input_ids"]
    assert batch["token_type_ids"][1].tolist() == pairs[1]["token_type_ids"] + [0] * (batch["input_ids"].shape[1] - n)


def test_collator_with_masked_lm(bert_tokenizer, texts):
    """ALBERT's objective: order and n-gram masking of whole words on the same rows; both labels feed one model."""
    from transformers import BertConfig, BertForPreTraining

    objective = SentenceOrderObjective(max_seq_length=48, mlm=MaskedLMObjective(selection="ngram"))
    pairs = sentence_pairs(texts, bert_tokenizer, objective)
    collator = objective.collator(bert_tokenizer, seed=2)
    rows = list(pairs)
    batch = collator(rows[:4])
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels", "next_sentence_label"}
    target = batch["labels"] != -100
    assert target.any(1).all()
    collator.set_epoch(1)
    assert not torch.equal(batch["labels"], collator(rows[:4])["labels"])
    assert torch.equal(batch["labels"], collator.as_static()(rows[:4])["labels"])
    collator.set_epoch(0)
    loaded = list(DataLoader(rows, batch_size=4, collate_fn=collator, num_workers=2))
    assert all(torch.equal(loaded[0][name], batch[name]) for name in batch)
    config = BertConfig(
        vocab_size=len(bert_tokenizer), hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    torch.manual_seed(0)
    model = BertForPreTraining(config).eval()
    output = model(**batch)
    mlm = torch.nn.functional.cross_entropy(output.prediction_logits[target], batch["labels"][target])
    sop = torch.nn.functional.cross_entropy(output.seq_relationship_logits, batch["next_sentence_label"])
    assert output.loss.item() == pytest.approx((mlm + sop).item(), rel=1e-5)


def test_collator_needs_the_pair_columns(bert_tokenizer):
    with pytest.raises(ValueError, match=r"sentence_pairs.*remove_unused_columns"):
        NextSentenceObjective().collator(bert_tokenizer)([{"input_ids": [2, 5, 3, 6, 3]}])


def test_bad_settings_of_the_masked_lm_beside():
    with pytest.raises(ValueError, match="`mask_prob` in \\(0, 1\\), got 0"):
        build_objective({"type": "sop", "mlm": {"type": "mlm", "mask_prob": 0.0}})


def test_masked_lm_beside_must_be_one():
    with pytest.raises(TypeError, match="Field 'mlm' .*CausalLMObjective"):
        NextSentenceObjective(mlm="clm")
    assert NextSentenceObjective(mlm="mlm").mlm == MaskedLMObjective()
