"""`hf-xformers linearize`: stages that lower what they are for, touch what they may, and go on where they were
killed."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_xformers.cli import main
from hf_xformers.cli.linearize import run
from hf_xformers.conversion.linearization import FILE, Linearization, StageRecord, read_linearization
from hf_xformers.conversion.swap import open_model, swap_checkpoint, swap_components
from hf_xformers.training.attention_transfer import attention_pairs, transfer_losses
from hf_xformers.training.earlier_stages import put_aside
from hf_xformers.training.linearizing import STAGES, SWAPPED
from tests.forks import forks
from tests.training.processes import result, run_jobs
from tests.training.runs import flags, pretrain, summary, weights

MODERN = "--position rotary --residual pre_ln --normalization rms_norm --attention.bias false".split()

SHARP = {"num_key_value_heads": 1, "initializer_range": 0.3}  # attention far from a mere mean


@pytest.fixture(scope="module")
def source(text, tmp_path_factory):
    """A small decoder with rotary positions and grouped heads."""
    folder = tmp_path_factory.mktemp("source") / "run"
    return pretrain(text, folder, *MODERN, objective="clm", max_steps=30, learning_rate=0.01, **SHARP)


def arguments(text, model, output, **options):
    defaults = {
        "model": model,
        "data": text,
        "output_dir": output,
        "attention": "hedgehog",
        "block_size": 16,
        "transfer_steps": 4,
        "distillation_steps": 3,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "disable_tqdm": "true",
    }
    return flags(**{**defaults, **options})


def linearize(text, model, output, *extra, callbacks=(), **options):
    assert run([*arguments(text, model, output, **options), *extra], callbacks) == 0
    return output


RECURRENT = ("beta_proj", "decay", "gate_proj", "output_norm", "short_conv", "skip")


def test_the_name_of_the_baseline_in_0_1_0_is_read(tmp_path):
    record = Linearization("folder", {"type": "hedgehog"}, [0], baseline_loss=2.5)
    record.write(tmp_path)
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace("baseline_loss", "floor_loss"))
    assert read_linearization(tmp_path) == record


@pytest.mark.parametrize("attention", ["hedgehog", "performer", "gated_delta_net"])
def test_transfer_lowers_each_error_and_touches_its_own(attention, text, source, tmp_path, capsys):
    options = {"transfer_steps": 30, "distillation_steps": 0, "transfer_learning_rate": 3e-3}
    out = linearize(text, source, tmp_path / "out", attention=attention, validation_fraction=0.3, **options)
    record = read_linearization(out)
    before, after = record.layer_errors["swapped"], record.layer_errors["transfer"]
    assert len(before) == 2 and all(b < a for a, b in zip(before, after))
    swap_checkpoint(source, tmp_path / "swapped", attention=attention, measure=False)
    start, end = weights(tmp_path / "swapped"), weights(out)
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    parts = {"performer": ("q_proj", "k_proj"), "gated_delta_net": RECURRENT}
    parts = parts.get(attention, ("map",))
    assert changed and all("attention" in name and any(part in name for part in parts) for name in changed)
    assert record.stages[0].trained == sum(start[name].numel() for name in changed)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Attention transfer: 30 steps" in shown and "of the attention" in shown


def test_losses_are_those_of_each_layer_by_itself(source):
    """Against the source's own inputs and outputs, layer by layer."""
    torch.manual_seed(0)
    teacher = open_model(source)[0]
    student, _ = swap_components(source, attention={"type": "lolcats", "window": 3}, measure=False)
    ids = torch.randint(5, 300, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    pairs, seen = attention_pairs(student, teacher, [0, 1]), []
    hooks = [
        pair.source.register_forward_hook(lambda module, given, result: seen.append((*given, result.output)))
        for pair in pairs
    ]
    with torch.no_grad():
        teacher(ids, attention_mask=mask)
        [hook.remove() for hook in hooks]
        expected = []
        for pair, (states, context, output) in zip(pairs, seen):
            own = pair.student(states, context).output
            real = mask.bool()
            expected.append(((own - output)[real].square().sum() / output[real].square().sum()).item())
        found = transfer_losses(student, pairs, {"input_ids": ids, "attention_mask": mask, "labels": ids})
        entropies = transfer_losses(student, pairs, {"input_ids": ids, "attention_mask": mask}, "weights")
    assert [value.item() for value in found] == pytest.approx(expected, rel=1e-4)
    own = student(ids, attention_mask=mask, output_attentions=True).attentions[0]
    taught = teacher(ids, attention_mask=mask, output_attentions=True).attentions[0]
    entropy = -(taught * (own + 1e-8).log()).sum(-1).transpose(1, 2)[mask.bool()].mean()
    assert entropies[0].item() == pytest.approx(entropy.item(), rel=1e-4)


class Stop(TrainerCallback):
    """Ends the run at a step of one stage."""

    def __init__(self, stage, step):
        self.stage, self.step = stage, step

    def on_step_end(self, args, state, control, **kwargs):
        if Path(args.output_dir).name == self.stage and state.global_step == self.step:
            self.end()

    def end(self):
        raise InterruptedError(self.stage)


class Look(TrainerCallback):
    """Which tensors the checkpoints of each stage hold, and which models there are when it ends."""

    def __init__(self):
        self.tensors, self.models = {}, {}

    def on_train_end(self, args, state, control, **kwargs):
        folder = Path(args.output_dir)
        found = sorted(folder.glob("checkpoint-*/model.safetensors"))
        self.tensors[folder.name] = [set(weights(path.parent)) for path in found]
        self.models[folder.name] = {path.parent.name for path in folder.parent.glob("*/model.safetensors")}


def test_what_is_kept_on_the_disk(text, source, tmp_path):
    """Checkpoints hold what their stage trains; finished, it keeps its account, and at the end there is one model."""
    look = Look()
    out = linearize(text, source, tmp_path / "out", lora_steps=4, callbacks=[look])
    whole = set(weights(out))
    new = {name for name in whole if "_map." in name}
    assert new and look.tensors["transfer"] == [new, new]
    assert look.tensors["distillation"] == [whole, whole]
    assert all("lora_" in name for found in look.tensors["lora"] for name in found) and len(look.tensors["lora"]) == 2
    assert look.models == {"transfer": {"swapped"}, "distillation": {"transfer"}, "lora": {"distillation"}}
    left = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() and path.parent != out}
    assert left == {f"{stage}/{name}" for stage in STAGES for name in ("training_summary.json", "trainer_state.json")}
    assert json.loads((out / "training_summary.json").read_text())["init_from"] == str(source)


def test_seconds_go_on_after_an_interruption(text, source, tmp_path, monkeypatch):
    """Of a stage that was stopped the record has those of both processes."""
    clock = [0.0]
    monkeypatch.setattr("hf_xformers.training.callbacks.time.perf_counter", lambda: clock[0])

    class Tick(Stop):
        def on_step_end(self, args, state, control, **kwargs):
            clock[0] += 100
            super().on_step_end(args, state, control, **kwargs)

    options = {"distillation_steps": 0, "save_steps": 1}
    with pytest.raises(InterruptedError):
        linearize(text, source, tmp_path / "out", callbacks=[Tick("transfer", 3)], **options)
    clock[0] += 5000  # between the two
    linearize(text, source, tmp_path / "out", "--resume_from_checkpoint", callbacks=[Tick("", 0)], **options)
    # the third step was stopped before it was saved
    assert read_linearization(tmp_path / "out").stages[0].seconds == 400
    assert summary(tmp_path / "out")["seconds"] == 400


def test_more_than_the_gap_is_explained():
    stages = [StageRecord("transfer", 4, 0.01, 1, 2, "maps", 1.0, loss=loss) for loss in (3.5, 2.5)]
    record = Linearization("m", {"type": "hedgehog"}, [0], source_loss=3.0, swapped_loss=4.0, stages=stages[:1])
    assert "50.0% of the gap" in " ".join(record.sentences()) and "whole gap" not in " ".join(record.sentences())
    record.stages = stages
    assert "150.0% of the gap" in " ".join(record.sentences())
    assert any("the training text resembles the held-out text" in line for line in record.sentences())


class Kill(Stop):
    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_that_was_killed_ends_with_the_same_weights(text, source, tmp_path):
    """Stopped in every stage, once by SIGKILL in a process of its own; finished stages are not repeated."""
    options = {"lora_steps": 3, "attention": "lolcats", "attention.window": 4, "distillation_learning_rate": 0.01}
    whole = linearize(text, source, tmp_path / "whole", **options)
    cut, done = tmp_path / "cut", []
    code = (
        "import sys\nfrom hf_xformers.cli.linearize import run\nfrom tests.cli.test_linearize import Kill\n"
        "run(sys.argv[1:], [Kill('transfer', 3)])"
    )
    killed = forks().run(code, *arguments(text, source, cut, **options))
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    for stage, step in (("distillation", 1), ("distillation", 3), ("lora", 2)):
        with pytest.raises(InterruptedError):
            linearize(text, source, cut, "--resume_from_checkpoint", callbacks=[Stop(stage, step)], **options)
        done.append([entry.name for entry in read_linearization(cut).stages])
    assert done == [["transfer"], ["transfer"], ["transfer", "distillation"]]
    linearize(text, source, cut, "--resume_from_checkpoint", **options)
    one, other = weights(whole), weights(cut)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not any("lora" in name or "base_layer" in name for name in one)
    records = [read_linearization(folder) for folder in (whole, cut)]
    assert all(stage.seconds > 0 for record in records for stage in record.stages)
    assert records[0].layer_errors == records[1].layer_errors
    assert [entry.loss for entry in records[0].stages] == [entry.loss for entry in records[1].stages]


def test_the_result_is_a_plain_checkpoint(text, source, tmp_path, capsys):
    """It loads, generates with a state that does not grow, has its account on its card; other layers stay."""
    out = linearize(text, source, tmp_path / "out", layers="1", lora_steps=2)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert [model.config.layer(index).attention.type for index in (0, 1)] == ["dense", "hedgehog"]
    found = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)
    assert found.shape == (1, 7)
    record = json.loads((out / "linearization.json").read_text())
    assert record["status"] == "finished" and record["layers"] == [1]
    assert [entry["name"] for entry in record["stages"]] == ["transfer", "distillation", "lora"]
    assert all(entry["loss"] > 0 for entry in record["stages"]) and record["baseline_loss"] > 0
    capsys.readouterr()
    assert main(["card", str(out), "--to", str(tmp_path / "card.md")]) == 0
    card = (tmp_path / "card.md").read_text()
    assert (
        "## Linearization" in card and "The attention of layer 1 is `hedgehog`" in card and str(tmp_path) not in card
    )
    with pytest.raises(ValueError, match="holds a linearization already"):
        linearize(text, source, out, layers="1", lora_steps=2)
    with pytest.raises(ValueError, match="had transfer_steps 4, and this command gives 5"):
        linearize(text, source, out, "--resume_from_checkpoint", layers="1", lora_steps=2, transfer_steps=5)
    with pytest.raises(ValueError, match="names a checkpoint, and this command continues where it was stopped"):
        linearize(text, source, out, "--resume_from_checkpoint", str(out / "lora"), layers="1", lora_steps=2)
    linearize(text, source, out, "--resume_from_checkpoint", layers="1", lora_steps=2)
    assert "finished already" in capsys.readouterr().err


def test_an_encoder_learns_from_masked_tokens(text, tmp_path):
    bert = pretrain(text, tmp_path / "bert", variant="bert", max_steps=4)
    out = linearize(text, bert, tmp_path / "out", attention="hedgehog", transfer_loss="weights")
    record = read_linearization(out)
    assert record.stages[0].what.startswith("`query_map`, `key_map`") and record.source_loss and record.swapped_loss


def test_from_a_checkpoint_of_transformers(text, source, tmp_path):
    """A Llama's folder is converted, swapped and taught by what it was."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, max_position_embeddings=64, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    before = {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()}
    out = linearize(text, tmp_path / "llama", tmp_path / "out", attention="lolcats", distillation_steps=1)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.attention.type == "lolcats" and read_linearization(out).status == "finished"
    assert {path.name: path.read_bytes() for path in (tmp_path / "llama").iterdir()} == before


REFUSED = {
    "no model": ({"model": "nowhere"}, "nowhere"),
    "layers": ({"layers": "7"}, "Layers '7' do not exist: the model has 2"),
    "no attention": ({"attention": None}, "give --attention NAME"),
    "same attention": ({"attention": "dense"}, "has 'dense' attention already"),
    "no steps": ({"transfer_steps": 0, "distillation_steps": 0}, "no stage has a step"),
    "negative": ({"lora_steps": -1}, "--lora_steps must not be negative, got -1"),
    "steps of one run": ({"max_steps": 9}, "--max_steps 9 is for a single training"),
    "epochs of one run": ({"num_train_epochs": 9}, "--num_train_epochs 9 has no effect on stages"),
    "rate": ({"transfer_learning_rate": 0}, "--transfer_learning_rate must be above 0"),
    "objective": ({"objective": "mlm"}, "--objective mlm is not for the model"),
    "weights": ({"attention": "delta_net", "transfer_loss": "weights"}, "take --transfer_loss output"),
    "rank": ({"lora_rank": 0}, "--lora_rank must be at least 1"),
    "rank without its stage": ({"lora_rank": 4}, "--lora_rank 4 has no effect without --lora_steps; give both"),
    "loss without its stage": (
        {"transfer_steps": 0, "transfer_loss": "weights"},
        "--transfer_loss weights has no effect without --transfer_steps",
    ),
    "field": ({"attention.windows": 3}, "Unknown field 'windows'"),
    "temperature": ({"temperature": 0}, "--temperature must be above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name, text, source, tmp_path, capsys):
    options, message = dict(REFUSED[name][0]), REFUSED[name][1]
    code = main(["linearize", *arguments(text, options.pop("model", source), tmp_path / "out", **options)])
    error = " ".join(capsys.readouterr().err.split())
    assert code == 2 and message in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_head_teaches_nothing(text, tmp_path, capsys):
    bert = pretrain(text, tmp_path / "bert", variant="bert", max_steps=1)
    AutoModel.from_pretrained(bert).save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "bare")
    assert main(["linearize", *arguments(text, tmp_path / "bare", tmp_path / "out")]) == 2
    assert (
        "has no head that predicts tokens" in capsys.readouterr().err and not (tmp_path / "out" / "swapped").exists()
    )


def test_what_data_refuses_leaves_nothing(text, source, tmp_path, capsys):
    bart = pretrain(text, tmp_path / "bart", variant="bart", objective="span", max_steps=1)
    assert main(["linearize", *arguments(text, bart, tmp_path / "out")]) == 2
    assert "is an encoder-decoder" in capsys.readouterr().err
    bert = pretrain(text, tmp_path / "bert", variant="bert", max_steps=1)
    assert main(["linearize", *arguments(text, bert, tmp_path / "out", block_size=4096)]) == 2
    assert "covers only" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_is_overwritten_is_kept_until_the_data_is_read(text, source, tmp_path, capsys):
    """A refusal, or an end while the data is read, leaves the earlier run as it was; then it gives way."""
    out = linearize(text, source, tmp_path / "out", save_strategy="no")
    before = {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    (tmp_path / "short.txt").write_text("")
    options = {"save_strategy": "no", "attention": "t2r", "data": tmp_path / "short.txt"}
    command = [*arguments(text, source, out, **options), "--overwrite_output_dir"]
    assert main(["linearize", *command]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    names = (SWAPPED, *STAGES)
    put_aside(out, FILE, names)  # as a run does that is killed before it has read its data
    (out / "swapped").mkdir()
    with pytest.raises(ValueError, match="holds a linearization already"):
        linearize(text, source, out, attention="t2r")
    assert {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    linearize(text, source, out, "--overwrite_output_dir", attention="t2r", distillation_steps=0)
    assert read_linearization(out).attention["type"] == "t2r" and not (out / "distillation").exists()
    assert not list(out.glob(".earlier"))


@pytest.mark.slow
def test_two_processes(text, source, tmp_path):
    """Each reads its part of a batch; the stages follow each other, and a run that was stopped goes on."""
    options = {"per_device_train_batch_size": 2, "use_cpu": "true", "ddp_backend": "gloo", "lora_steps": 2}
    command = [*arguments(text, source, tmp_path / "two", **options), "--resume_from_checkpoint"]
    (tmp_path / "arguments.json").write_text(json.dumps(command))
    run_jobs("tests.cli.linearize_jobs", ["stopped", "resumed"], tmp_path, worlds=(2,))
    for rank in (0, 1):
        assert result(tmp_path, "stopped", 2, rank) is True and result(tmp_path, "resumed", 2, rank) == 0
    record = read_linearization(tmp_path / "two")
    assert record.status == "finished" and [stage.name for stage in record.stages] == list(STAGES)
    assert [stage.steps for stage in record.stages] == [4, 3, 2]
    alone = read_linearization(linearize(text, source, tmp_path / "one", lora_steps=2))
    assert record.swapped_loss == pytest.approx(alone.swapped_loss, rel=1e-4)
    for one, two in zip(alone.stages, record.stages):
        assert two.loss == pytest.approx(one.loss, rel=5e-3)
