"""UniLM's objective: the mix of modes, rows in their modes, masks by frequency, fine-tuning, commands."""

import math
import shutil

import pytest
import torch

import hf_xformers.cli
from hf_xformers import XFUniLMConfig
from hf_xformers.finetuning.tasks.cloze import ClozeCollator, joined
from hf_xformers.objectives import build_objective
from hf_xformers.objectives.sentence_pairs import sample_noise as sample_pairs
from hf_xformers.objectives.unilm import in_mode, sample_mode, sample_noise
from hf_xformers.training.building import build_config, refuse_other_component
from hf_xformers.variants import config_class
from tests.training.runs import pretrain, same_run
from tests.training.test_document_pairs import documents

BOTH, LEFT, RIGHT, PAIR = range(4)
IDS = torch.tensor([2, 10, 11, 3, 12, 13, 14, 3])
SECOND = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]).bool()
FINE = {"type": "unilm", "mode_probs": (0, 1, 0, 0), "target_mask_prob": 0.7}


def near(count, total, share):
    return abs(count / total - share) <= 4 * math.sqrt(share * (1 - share) / total) + 1e-9


def test_rows_in_their_modes():
    for mode in (BOTH, PAIR):
        ids, second, kept = in_mode(IDS, SECOND, mode)
        assert torch.equal(ids, IDS) and torch.equal(second, SECOND) and kept.all()
    for mode in (LEFT, RIGHT):
        ids, second, kept = in_mode(IDS, SECOND, mode)
        assert ids.tolist() == [2, 10, 11, 12, 13, 14, 3] and not second.any() and kept.tolist().index(False) == 3
        assert torch.equal(in_mode(IDS[:4], SECOND[:4], mode)[0], IDS[:4])


def test_the_mix_over_pairs_and_modes():
    """A third from both sides, half of them with a second text of elsewhere; a third pairs; a sixth each side."""
    objective = build_objective({"type": "unilm", "max_seq_length": 20, "short_seq_prob": 0})
    texts, seen, random_pairs = [[4] * 40, [5] * 40, [3] * 40], [0] * 4, 0
    for epoch in range(150):
        generator = torch.Generator().manual_seed(epoch)
        for number in range(3):
            for plan in sample_pairs(number, lambda index: texts[index], 3, objective, generator):
                assert (plan.label == 1) == (plan.a.document != plan.b.document)
                seen[sample_mode(plan.label, objective, generator)] += 1
                random_pairs += plan.label
    total = sum(seen)
    assert total > 2000 and near(random_pairs, total, 1 / 6)
    for mode, share in ((BOTH, 1 / 3), (PAIR, 1 / 3), (LEFT, 1 / 6), (RIGHT, 1 / 6)):
        assert near(seen[mode], total, share)
    only = build_objective({"type": "unilm", "mode_probs": (0, 0, 0, 1)})
    assert {sample_mode(0, only, torch.Generator().manual_seed(seed)) for seed in range(20)} == {RIGHT}


def test_masks_by_frequency():
    """15 % of the tokens, one in five draws in a bigram or trigram; none special; 80, 10 and 10 % of them."""
    objective, vocabulary = build_objective("unilm"), torch.arange(5, 45)
    special = torch.zeros(400, dtype=torch.bool)
    special[[0, 200, 399]] = True
    generator, actions, alone, starts = torch.Generator().manual_seed(0), torch.zeros(3), 0, 0
    for _ in range(200):
        noise = sample_noise(special, special & False, BOTH, objective, vocabulary, generator)
        assert int(noise.selected.sum()) == 60 and not noise.selected[special].any()
        actions += torch.bincount(noise.action[noise.selected].long(), minlength=3)
        runs = torch.nn.functional.pad(noise.selected.int(), (1, 1)).diff()
        sizes = (runs == -1).nonzero() - (runs == 1).nonzero()
        alone, starts = alone + int((sizes == 1).sum()), starts + len(sizes)
    for found, share in zip(actions.tolist(), (0.1, 0.8, 0.1), strict=True):  # kept, masked, random
        assert near(found, 12000, share)
    # Single tokens with a neighbour that is chosen too are fewer than four in five, and there are many.
    assert 0.55 < alone / starts < 0.8
    single = build_objective({"type": "unilm", "ngram_prob": 0})
    assert int(sample_noise(special[:3], special[:3], BOTH, single, vocabulary, generator).selected.sum()) == 1


def test_fine_tuning_masks_targets_and_their_end():
    objective, vocabulary = build_objective(FINE), torch.arange(5, 45)
    special, ends, generator = (IDS < 5), 0, torch.Generator().manual_seed(0)
    for _ in range(400):
        selected = sample_noise(special, SECOND, PAIR, objective, vocabulary, generator).selected
        assert int(selected.sum()) == 3 and not selected[~SECOND].any()  # round(0.7 * 4)
        ends += int(selected[-1])
    assert near(ends, 400, 0.75)


def pairs(count=24):
    made = []
    for number in range(count):
        a, b = list(range(6, 9 + number)), list(range(20, 29))
        ids, types = [2, *a, 3, *b, 3], [0] * (len(a) + 2) + [1] * (len(b) + 1)
        made.append({"input_ids": ids, "token_type_ids": types, "next_sentence_label": int(number % 6 == 0)})
    return made


@pytest.mark.parametrize("side", ["right", "left"])
def test_batches(bert_tokenizer, side):
    bert_tokenizer.padding_side = side
    try:
        rows = pairs()
        collator = build_objective("unilm").collator(bert_tokenizer, seed=3)
        batch, seen = collator(rows), set()
        for index, row in enumerate(rows):
            real = batch["attention_mask"][index].bool()
            mode, first = batch["mask_modes"][index].tolist()
            seen.add(mode)
            ids, second, _ = in_mode(torch.tensor(row["input_ids"]), torch.tensor(row["token_type_ids"]) > 0, mode)
            labels, inputs = batch["labels"][index], batch["input_ids"][index][real]
            target = labels[real] != -100
            assert target.any() and (labels[~real] == -100).all() and int((~second).sum()) == first
            assert torch.equal(labels[real][target], ids[target]) and torch.equal(inputs[~target], ids[~target])
            pair = {BOTH: (0, 1), LEFT: (2, 2), RIGHT: (3, 3), PAIR: (4, 5)}[mode]
            assert torch.equal(batch["token_type_ids"][index][real], torch.where(second, pair[1], pair[0]))
            expected = row["next_sentence_label"] if mode == BOTH else -100
            assert batch["next_sentence_label"][index] == expected
            assert row["next_sentence_label"] == 0 or mode == BOTH
            alone = collator([row])
            assert torch.equal(alone["labels"][0], labels[real]) and alone["mask_modes"].tolist() == [[mode, first]]
        assert seen == {BOTH, LEFT, RIGHT, PAIR}
        collator.set_epoch(1)
        assert not torch.equal(collator(rows)["mask_modes"], batch["mask_modes"])
        plain = {name: value for name, value in rows[1].items() if name != "next_sentence_label"}
        fine = build_objective({**FINE, "segment_ids_per_mode": False}).collator(bert_tokenizer)([plain])
        assert fine["mask_modes"].tolist() == [[PAIR, 6]] and set(fine["token_type_ids"][0].tolist()) == {0, 1}
    finally:
        bert_tokenizer.padding_side = "right"


@pytest.mark.parametrize("types", [6, 2])
def test_rows_of_source_and_target(bert_tokenizer, types):
    """As tasks of generation have them: seven tenths of a target are masked, its end as often as the rest."""
    columns = joined([[2, 6, 7, 3], [2, 8, 3]], [[9, 10, 11, 3], [12, 3]])
    assert columns["input_ids"] == [[2, 6, 7, 3, 9, 10, 11, 3], [2, 8, 3, 12, 3]]
    assert columns["token_type_ids"][1] == [0, 0, 0, 1, 1]
    rows = [{"input_ids": ids, "token_type_ids": kinds} for ids, kinds in zip(*columns.values(), strict=True)]
    collate = ClozeCollator(bert_tokenizer, XFUniLMConfig(type_vocab_size=types), seed=1)
    batch = collate(rows)
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels", "mask_modes"}
    assert batch["mask_modes"].tolist() == [[PAIR, 4], [PAIR, 3]]
    source, target = (4, 5) if types == 6 else (0, 1)
    assert batch["token_type_ids"][0].tolist() == [source] * 4 + [target] * 4
    told = (batch["labels"] != -100).tolist()
    assert [sum(row) for row in told] == [3, 1] and not any(told[0][:4]) and not any(told[1][:3])
    ends = 0
    for epoch in range(200):
        collate.set_epoch(epoch)
        ends += int(collate(rows)["labels"][0, 7] == 3)
    assert near(ends, 200, 0.75)
    alone = joined([[2, 6, 7, 3], [2, 8, 3]], None)
    batch = collate([{"input_ids": ids, "token_type_ids": kinds} for ids, kinds in zip(*alone.values(), strict=True)])
    assert "labels" not in batch and batch["input_ids"].tolist() == [[2, 6, 7, 3], [2, 8, 3, 0]]
    assert batch["mask_modes"].tolist() == [[PAIR, 4], [PAIR, 3]] and batch["token_type_ids"][0, 0] == source


def test_refusals(bert_tokenizer):
    objective = build_objective("unilm")
    assert build_objective(objective.to_dict()) == objective and objective.head == "PreTraining"
    with pytest.raises(ValueError, match="needs stack 'mask_modes', and 'xf_bert' has 'plain'; take variant xf_unilm"):
        refuse_other_component(build_config(config_class("xf_bert"), "tiny", objective), objective)
    bert = build_config(config_class("xf_bert"), "tiny", objective, components={"stack": "mask_modes"})
    with pytest.raises(ValueError, match="type_vocab_size=2: build it with --type_vocab_size 6, or give"):
        objective.bound_to(bert)
    assert build_objective({"type": "unilm", "segment_ids_per_mode": False}).bound_to(bert)
    with pytest.raises(ValueError, match="attention 'performer' does not take"):
        build_config(config_class("xf_unilm"), "tiny", objective, components={"attention": "performer"})
    with pytest.raises(ValueError, match="lacks 'token_type_ids'"):
        objective.collator(bert_tokenizer)([{"input_ids": [2, 6, 3]}])
    for fields, message in (
        ({"mode_probs": (0.5, 0.5, 0.5, 0)}, "four shares with the sum 1"),
        ({"target_mask_prob": 0.7, "mode_probs": (1, 0, 0, 0)}, "give them a share in mode_probs"),
        ({"mlm": {"type": "mlm", "selection": "ngram"}}, "leave its selection"),
        ({"mlm": None}, "mlm must be"),
    ):
        with pytest.raises(ValueError, match=message):
            build_objective({"type": "unilm", **fields})


def test_runs_go_on_are_evaluated_and_fine_tuned(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(documents()))
    shape = {"variant": "unilm", "objective": "unilm", "block_size": 32, "validation_fraction": 0.2}
    shape |= {"save_strategy": "steps", "save_steps": 2}
    out = pretrain(text, tmp_path / "out", **shape)
    shutil.copytree(out, tmp_path / "whole")
    pretrain(text, out, "--resume_from_checkpoint", str(out / "checkpoint-2"), **shape)
    same_run(out, tmp_path / "whole")
    assert hf_xformers.cli.main(["evaluate", "--model", str(out), "--data", str(text), "--json"]) == 0
    fine = {"objective": "unilm", "objective.mode_probs": "0,1,0,0", "objective.target_mask_prob": 0.7}
    sizes = dict.fromkeys(("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers"))
    pretrain(text, tmp_path / "fine", **fine, **sizes, vocab_size=None, init_from=out, block_size=32)
