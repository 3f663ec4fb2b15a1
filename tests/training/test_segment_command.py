"""`hf-xformers pretrain` and `evaluate` of models with a segment memory: streams by default, resumption, refusals."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import hf_xformers.cli
from hf_xformers.cli.pretrain import run
from hf_xformers.objectives import build_objective
from hf_xformers.training.text import TextData, load_splits, make_rows
from tests.refused import refused
from tests.training.runs import flags, pretrain, pretrain_flags, same_run, summary

VARIANTS = {
    "transformer_xl": {"max_position_embeddings": 16},
    "compressive_transformer": {"max_position_embeddings": 16},
}


class Memories(TrainerCallback):
    """Whether each training batch came with a memory, and the ids of its first row."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.seen = []
        model.register_forward_pre_hook(self.hook, with_kwargs=True)

    def hook(self, module, args, kwargs):
        if module.training:
            self.seen.append((kwargs.get("segment_memory") is not None, kwargs["input_ids"][0].tolist()))


@pytest.mark.parametrize("variant, streams", [*((name, True) for name in VARIANTS), ("transformer_xl", False)])
def test_streams_are_the_default(text, tmp_path, variant, streams):
    """Every batch but the first has a memory, and the first stream is the beginning of the rows, in order."""
    record = Memories()
    options = VARIANTS[variant] if streams else {"segment_streams": "false"}
    assert run(pretrain_flags(text, tmp_path / "run", variant=variant, **options), [record]) == 0
    assert [memory for memory, _ in record.seen] == [False, streams, streams, streams]
    assert summary(tmp_path / "run")["train_streams"] == (4 if streams else None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run")
    source = TextData(**summary(tmp_path / "run")["data"])
    rows = make_rows(load_splits(source)["train"], tokenizer, build_objective("clm"), 16, whole=False)
    assert ([ids for _, ids in record.seen] == rows["input_ids"][:4]) is streams


def test_evaluation_carries_the_memory(text, tmp_path, capsys):
    """The held-out loss is that of a loop over the streams by hand, in the run, in `evaluate`, and differs without."""
    options = {"variant": "transformer_xl", "max_steps": 20, "learning_rate": 0.01, "sample_by": "line"}
    output = pretrain(text, tmp_path / "run", **options, per_device_eval_batch_size=2)
    capsys.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(output)
    source = TextData(**summary(output)["data"])
    rows = make_rows(load_splits(source)["validation"], tokenizer, build_objective("clm"), 16, whole=True)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    longer = -(-len(rows) // 2)

    def by_hand(carry):
        total = count = 0.0
        with torch.no_grad():
            for stream in (rows[:longer], rows[longer:]):
                memory = None
                for row in stream:
                    ids = torch.tensor([row])
                    made = model(ids, segment_memory=memory if carry else None, use_cache=False)
                    memory = made.segment_memory
                    nats = -torch.log_softmax(made.logits[0, :-1].double(), -1).gather(1, ids[0, 1:, None])
                    total, count = total + nats.sum().item(), count + len(nats)
        return total / count

    def evaluate(*more):
        assert hf_xformers.cli.main(["evaluate", "--model", str(output), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["loss"]

    assert summary(output)["eval_loss"] == pytest.approx(by_hand(True), rel=1e-5)
    assert evaluate() == pytest.approx(by_hand(True), rel=1e-5)
    assert evaluate("--segment_streams", "false") == pytest.approx(by_hand(False), rel=1e-5)
    assert by_hand(True) != pytest.approx(by_hand(False), rel=1e-4)


@pytest.mark.parametrize("variant", ["transformer_xl", "recurrent_pretrained_lm"])
def test_resumption_is_exact(text, tmp_path, variant):
    """From the middle of an epoch and past its border; dropout is on. An epoch leaves out what fills no batch."""
    options = {
        "variant": variant,
        "stack.window_size": 8 if variant == "recurrent_pretrained_lm" else None,
        "hidden_dropout_prob": 0.1,
        "max_steps": None,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 9,
        "save_strategy": "steps",
        "save_steps": 5,
        "save_total_limit": 10,
        "eval_strategy": "steps",
        "eval_steps": 5,
    }
    whole = pretrain(text, tmp_path / "whole", **options)
    batches = summary(whole)["train_rows"] // 9
    assert summary(whole)["steps"] == 2 * batches and summary(whole)["train_rows"] % 9
    assert (whole / "checkpoint-5" / "segment_memory_0.pt").is_file() and batches % 5
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    for step in sorted(again.glob("checkpoint-*")):
        if step.name != "checkpoint-5":
            step.rename(tmp_path / f"gone-{step.name}")
    pretrain(text, again, "--resume_from_checkpoint", **options)
    same_run(again, whole)
    pretrain(text, again, "--resume_from_checkpoint", **options)  # of the finished run: nothing is left to do
    same_run(again, whole)


def test_refusals(text, tmp_path, capsys):
    def said(**options):
        return refused(capsys, "pretrain", *pretrain_flags(text, tmp_path / "run", **options))

    message = said(variant="gpt2", segment_streams=True)
    assert "carries a segment memory from row to row, and 'xf_gpt2' with stack 'plain' has none" in message
    assert "xf_compressive_transformer, xf_ernie_doc, xf_memformer, xf_recurrent" in message
    xl = {"variant": "transformer_xl"}
    assert "--streaming does not know how many" in said(**xl, segment_streams=True, streaming=True)
    assert "rows cannot be laid out in 1000 streams" in said(**xl, per_device_train_batch_size=1000)


def test_resume_with_other_streams_is_refused(text, tmp_path, capsys):
    options = {"variant": "transformer_xl", "save_strategy": "steps", "save_steps": 2}
    output = pretrain(text, tmp_path / "run", **options)
    argv = pretrain_flags(
        text, output, **{**options, "per_device_train_batch_size": 2, "max_steps": 8, "resume_from_checkpoint": True}
    )
    assert "had train_streams 4, and this command gives 2" in refused(capsys, "pretrain", *argv)


def test_uptraining(text, tmp_path, capsys):
    """It goes on with the memory; a teacher, who reads rows one by one, does not fit to it."""
    start = pretrain(text, tmp_path / "start", variant="transformer_xl", max_steps=1)
    common = {"model": start, "data": text, "block_size": 16, "max_steps": 1, "per_device_train_batch_size": 4}
    common |= {"save_strategy": "no", "disable_tqdm": "true"}
    assert hf_xformers.cli.main(["uptrain", *flags(**common, output_dir=tmp_path / "on")]) == 0
    assert summary(tmp_path / "on")["train_streams"] == 4
    with_teacher = flags(**common, output_dir=tmp_path / "taught", teacher=start)
    assert hf_xformers.cli.main(["uptrain", *with_teacher]) == 0
    assert summary(tmp_path / "taught")["train_streams"] is None
    assert "a --teacher reads every row by itself" in refused(capsys, "uptrain", *with_teacher, "--segment_streams")
