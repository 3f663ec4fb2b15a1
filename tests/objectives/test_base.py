"""Registry, specs, keyed randomness, workers, Trainer."""

import copy
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from hf_xformers.core.components import build_spec
from hf_xformers.objectives import (
    OBJECTIVES,
    CausalLMObjective,
    MaskedLMObjective,
    NextSentenceObjective,
    SpanCorruptionObjective,
    build_objective,
    register,
)
from hf_xformers.objectives.base import keyed_generator, pad_rows


def features(count=24, length=20):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 40, (length - index % 7,), generator=generator).tolist() for index in range(count)]
    return [{"input_ids": [2, *row, 3], "attention_mask": [1] * (len(row) + 2)} for row in rows]


def same(a, b):
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) for x, y in zip(a, b)
    )


def epoch_of(loader, collator, epoch):
    collator.set_epoch(epoch)
    return [dict(batch) for batch in loader]


def test_registry_holds_the_objectives_and_their_heads():
    heads = {name: cls.head for name, cls in OBJECTIVES.items()}
    assert (
        heads.items()
        >= {
            "mlm": "MaskedLM",
            "clm": "CausalLM",
            "span": "Seq2SeqLM",
            "nsp": "NextSentencePrediction",
            "sop": "NextSentencePrediction",
            "segment_reordering": "SegmentReordering",
            "sentence_masking": "MaskedSentences",
            "tlm": "MaskedLM",
            "multilingual_clm": "CausalLM",
        }.items()
    )
    kinds = {"nsp": "segment_pairs", "sentence_masking": "sentences", "tlm": "parallel", "mlm": "blocks"}
    assert kinds == {name: OBJECTIVES[name].rows for name in kinds}
    assert all(cls.id == name for name, cls in OBJECTIVES.items())


@pytest.mark.parametrize(
    "spec",
    [
        MaskedLMObjective(selection="ngram", max_predictions=20, ngram_max=2),
        CausalLMObjective(),
        SpanCorruptionObjective(noise_density=0.5, sentinel_start=99),
        NextSentenceObjective(mlm=MaskedLMObjective(mask_prob=0.2)),
    ],
)
def test_specs_round_trip_through_dicts(spec):
    assert build_objective(spec.to_dict()) == spec
    assert build_objective(spec) is spec


def test_wrong_specs_are_refused():
    with pytest.raises(ValueError, match=r"Unknown objective 'mml'. Did you mean 'mlm'\?.*clm, .*mlm"):
        build_objective("mml")
    with pytest.raises(ValueError, match=r"Unknown field 'mask_p' of objective 'mlm'. Did you mean 'mask_prob'"):
        build_objective({"type": "mlm", "mask_p": 0.1})
    with pytest.raises(TypeError, match="a name, a dict or a spec, got int: 3"):
        build_objective(3)
    with pytest.raises(TypeError, match="was given the attention component 'dense'"):
        build_objective(build_spec("attention", "dense"))
    with pytest.raises(TypeError, match=r"MaskedLMObjective: Field 'mask_prob' .*'0.15'"):
        MaskedLMObjective(mask_prob="0.15")
    with pytest.raises(TypeError, match=r"Field 'num_sentinels' expected int, got bool"):
        SpanCorruptionObjective(num_sentinels=True)
    with pytest.raises(TypeError, match=r"'selection' expected one of .*'roberta'.*got albert"):
        MaskedLMObjective(selection="albert")
    with pytest.raises(ValueError, match=r"'mlm' is already registered by hf_xformers.objectives.masked_lm"):
        register("mlm")(type("Other", (CausalLMObjective,), {}))
    assert CausalLMObjective.id == "clm"


@pytest.mark.parametrize("name", ["mlm", "clm"])
def test_block_of_row_objectives_is_the_block(name):
    assert build_objective(name).raw_block_size(128) == 128
    with pytest.raises(ValueError, match="at least 1"):
        build_objective(name).raw_block_size(0)


def test_special_tokens_hint(bert_tokenizer, gpt_tokenizer):
    assert MaskedLMObjective().special_tokens(bert_tokenizer) == ([2], [3])
    assert MaskedLMObjective().special_tokens(gpt_tokenizer) == ([], [])
    assert CausalLMObjective().special_tokens(bert_tokenizer) == ([], [])


def test_generator_key():
    ids = torch.arange(10)
    draw = lambda *key: torch.rand(4, generator=keyed_generator(*key)).tolist()  # noqa: E731
    first = draw(0, 0, ids)
    assert first == draw(0, 0, ids.clone())
    others = [draw(1, 0, ids), draw(0, 1, ids), draw(0, 0, ids + 1), draw(0, 0, ids[:-1])]
    assert all(other != first for other in others)


def test_pad_rows():
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert pad_rows(rows, 0, 4).tolist() == [[1, 2, 3, 0], [4, 0, 0, 0]]
    assert pad_rows(rows, 9, 4, "left").tolist() == [[9, 1, 2, 3], [9, 9, 9, 4]]


def test_rows_do_not_depend_on_neighbours_padding_or_container(bert_tokenizer):
    """A row gives the same values alone, in any batch, already padded, and as list, array or tensor."""
    collator = MaskedLMObjective().collator(bert_tokenizer)
    rows = features(6)
    whole = collator(rows)
    for index, feature in enumerate(rows):
        n = len(feature["input_ids"])
        ids = torch.tensor(feature["input_ids"])
        padded = {
            "input_ids": torch.cat([torch.zeros(3, dtype=torch.long), ids]).numpy(),
            "attention_mask": torch.cat([torch.zeros(3, dtype=torch.long), torch.ones(n, dtype=torch.long)]),
        }
        for variant in (feature, {"input_ids": ids}, {"input_ids": ids.to(torch.int32)}, padded):
            alone = collator([variant])
            for name in ("input_ids", "labels"):
                assert torch.equal(alone[name][0, :n], whole[name][index, :n])


def test_padding_side_multiple_and_given_width(bert_tokenizer):
    left = copy.deepcopy(bert_tokenizer)
    left.padding_side = "left"
    rows = features(3, length=9)
    right_batch = MaskedLMObjective().collator(bert_tokenizer, pad_to_multiple_of=8)(rows)
    left_batch = MaskedLMObjective().collator(left, pad_to_multiple_of=8)(rows)
    assert right_batch["input_ids"].shape == left_batch["input_ids"].shape == (3, 16)
    for index, feature in enumerate(rows):
        n = len(feature["input_ids"])
        for name in right_batch:
            assert torch.equal(right_batch[name][index, :n], left_batch[name][index, 16 - n :])
        assert left_batch["attention_mask"][index].tolist() == [0] * (16 - n) + [1] * n
        assert (left_batch["labels"][index, : 16 - n] == -100).all()
    fixed = [{"input_ids": [5, 6, 7, 0, 0, 0], "attention_mask": [1, 1, 1, 0, 0, 0]}]
    assert CausalLMObjective().collator(bert_tokenizer)(fixed)["input_ids"].shape == (1, 6)


def test_bad_features_are_refused(bert_tokenizer):
    collator = CausalLMObjective().collator(bert_tokenizer)
    with pytest.raises(ValueError, match="no features"):
        collator([])
    with pytest.raises(TypeError, match="tokenize"):
        collator([{"text": "w1"}])
    with pytest.raises(ValueError, match="'attention_mask' has 1 entries for 2"):
        collator([{"input_ids": [5, 6], "attention_mask": [1]}])
    with pytest.raises(ValueError, match="one row of ids"):
        collator([{"input_ids": [[5, 6]]}])
    with pytest.raises(ValueError, match="pad_to_multiple_of"):
        CausalLMObjective().collator(bert_tokenizer, pad_to_multiple_of=0)


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_collators_survive_copies(bert_tokenizer, copier):
    collator = MaskedLMObjective().collator(bert_tokenizer, seed=3)
    collator.set_epoch(2)
    twin = copier(collator)
    assert twin.epoch == 2 and twin._epoch.is_shared()
    assert same([collator(features())], [twin(features())])


def test_dynamic_static_and_dupe_factor(bert_tokenizer):
    """Ledger: two epochs give different targets in dynamic mode, the same in static mode; BERT repeats after 10."""
    rows = features()

    def labels(collator, epoch):
        collator.set_epoch(epoch)
        return collator(rows)["labels"]

    dynamic = MaskedLMObjective().collator(bert_tokenizer)
    assert not torch.equal(labels(dynamic, 0), labels(dynamic, 1))
    static = MaskedLMObjective().collator(bert_tokenizer, static=True)
    assert torch.equal(labels(static, 0), labels(static, 5))
    assert torch.equal(labels(dynamic.as_static(), 5), labels(static, 0))
    assert not dynamic.static
    bert = MaskedLMObjective(dupe_factor=10).collator(bert_tokenizer)
    assert torch.equal(labels(bert, 3), labels(bert, 13))
    assert len({tuple(labels(bert, epoch).flatten().tolist()) for epoch in range(12)}) == 10
    assert not torch.equal(labels(MaskedLMObjective().collator(bert_tokenizer, seed=1), 0), labels(dynamic, 0))


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_count_does_not_matter(bert_tokenizer, persistent):
    """Also over epochs with workers that persist: the epoch reaches them through shared memory."""
    collator = MaskedLMObjective().collator(bert_tokenizer, seed=5)
    alone = DataLoader(features(), batch_size=4, collate_fn=collator)
    workers = DataLoader(
        features(), batch_size=4, collate_fn=collator, num_workers=2, persistent_workers=persistent, prefetch_factor=2
    )
    epochs = []
    for epoch in (0, 1):
        expected = epoch_of(alone, collator, epoch)
        assert same(expected, epoch_of(workers, collator, epoch))
        epochs.append(expected)
    assert not same(*epochs)


def test_epoch_reaches_spawned_workers():
    """Spawned workers get the collator by pickle; shared memory must go with it."""
    collator = CausalLMObjective().collator(SimpleNamespace(pad_token_id=0, eos_token_id=1))
    context = torch.multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_answer_epochs, args=(collator, there))
    worker.start()
    try:
        for epoch in (3, 8):
            collator.set_epoch(epoch)
            here.send("epoch?")
            assert here.poll(120), "the worker did not answer"
            assert here.recv() == epoch
    finally:
        here.send(None)
        worker.join(60)


def _answer_epochs(collator, pipe):
    while pipe.recv() is not None:
        pipe.send(collator.epoch)


def test_resumed_loader_continues_with_the_same_batches(bert_tokenizer):
    """Skipping the batches that were used before leaves the rest as they were: no generator runs along."""
    from accelerate import skip_first_batches

    collator = MaskedLMObjective(selection="roberta").collator(bert_tokenizer)
    loader = DataLoader(features(), batch_size=4, collate_fn=collator)
    full = epoch_of(loader, collator, 7)
    fresh = MaskedLMObjective(selection="roberta").collator(bert_tokenizer)
    fresh.set_epoch(7)
    resumed = list(skip_first_batches(DataLoader(features(), batch_size=4, collate_fn=fresh), 3))
    assert same(full[3:], resumed)


def test_import_is_light():
    code = (
        "import sys, hf_xformers.objectives as o; print([m for m in ('transformers', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
