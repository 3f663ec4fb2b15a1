"""Several tasks over one encoder: how often each comes, what a step moves, one task as a run by itself, loading,
predicting, resuming, refusals."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import hf_xformers.cli
from hf_xformers.cli.several_tasks import split_file, split_tasks
from hf_xformers.finetuning.multi_task import MultiTaskModel, TaskBatchSampler, batch_counts, load_tasks
from hf_xformers.variants import config_class, family
from tests.finetuning.task_data import BARE, answering, classification, finetune, pretrained, regression, tagging
from tests.training.processes import result, run_jobs
from tests.training.runs import SHAPE, cut_after, flags, same_weights

LEARN = {"learning_rate": 0.01, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
SAVES = {**BARE, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 9}
IDS = torch.arange(5, 23).reshape(2, 9)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name in ("classes", "tags", "numbers"):
        (folder / name).mkdir()
    return {
        "a": classification(folder / "classes", count=64),
        "b": tagging(folder / "tags", count=48),
        "c": regression(folder / "numbers"),
        "bert": pretrained(folder / "bert", max_position_embeddings=32),
    }


def argv(places, output, tasks, *extra, **options):
    start = {"model": places["bert"]} if "variant" not in options else {**SHAPE, "vocab_size": 300}
    defaults = {**start, "output_dir": output, "per_device_train_batch_size": 8, "num_train_epochs": 1,
                "disable_tqdm": "true", "use_cpu": True}  # fmt: skip
    tokens = flags(**{**defaults, **options})
    for name, kind in tasks.items():
        tokens += ["--task", f"{name}={kind}", "--data", *(f"{name}={file}" for file in places[name])]
    return ["finetune", *tokens, *extra]


def several(places, output, tasks, *extra, **options):
    assert hf_xformers.cli.main(argv(places, output, tasks, *extra, **options)) == 0
    return json.loads((output / "training_summary.json").read_text())


BOTH = {"a": "classification", "b": "tagging"}


# ------------------------------------------------------------------------------------------------ sampling


def test_how_often_each_task_comes():
    sizes = [1600, 400, 100]
    assert batch_counts(sizes, 10, 1.0) == [160, 40, 10]
    for exponent in (0.5, 0.0, 0.2):
        counts = batch_counts(sizes, 10, exponent)
        weights = [size**exponent for size in sizes]
        assert sum(counts) == 210
        assert all(abs(n - 210 * w / sum(weights)) < 1 for n, w in zip(counts, weights))
    assert batch_counts([100000, 1], 10, 1.0)[1] == 1 and min(batch_counts([100000, 1], 10, 0.9)) == 1


@pytest.mark.parametrize("exponent", [1.0, 0.0])
def test_batches_are_of_one_task(exponent):
    sizes = [33, 10]
    sampler = TaskBatchSampler(sizes, 4, exponent, seed=3)
    first = list(sampler)
    assert len(first) == len(sampler) == 9 + 3 and list(sampler) == first
    of_task = [{int(row >= 33) for row in batch} for batch in first]
    assert all(len(kinds) == 1 for kinds in of_task)
    seen = Counter(row for batch in first for row in batch)
    if exponent == 1.0:  # every row once
        assert sorted(seen) == list(range(43)) and set(seen.values()) == {1}
    else:  # as many batches of the small one, whose rows come again when all were there
        assert sum(kinds == {1} for kinds in of_task) == 6
        counts = [seen[row] for row in range(33, 43)]
        assert set(counts) <= {2} and max(seen[row] for row in range(33)) == 1
    sampler.set_epoch(1)
    assert list(sampler) != first


# ------------------------------------------------------------------------------------------------ the model


def two_heads():
    torch.manual_seed(0)
    config = config_class("bert")
    kinds = {"a": ("SequenceClassification", 2), "b": ("TokenClassification", 3)}
    made = {name: (family("bert")[f"For{kind}"], config(**SHAPE, num_labels=n)) for name, (kind, n) in kinds.items()}
    return MultiTaskModel({name: cls(config) for name, (cls, config) in made.items()})


def test_one_encoder_and_what_a_step_moves():
    """A step on task a moves the encoder and head a; head b has neither moved nor a state in the optimizer, weight
    decay or not."""
    model = two_heads()
    names = [name for name, _ in model.named_parameters()]
    assert sum("embedding" in name and "token" in name for name in names) <= 2
    assert model.heads["a"].base_model is model.heads["b"].base_model is model.encoder
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = {name: value.clone() for name, value in model.named_parameters()}
    model(task="a", input_ids=IDS, labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert not any(name.startswith("heads.b.") for name in moved) and any(n.startswith("heads.a.") for n in moved)
    assert any(name.startswith("encoder.trunk.layers.0.") for name in moved)
    states = {id(parameter) for parameter in optimizer.state}
    assert not any(id(p) in states for name, p in model.named_parameters() if name.startswith("heads.b."))


# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def run(places, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, several(places, folder, BOTH, num_train_epochs=6, **LEARN)


def test_both_tasks_are_learned(run):
    folder, summary = run
    assert summary["tasks"]["a"]["eval_accuracy"] > 0.85 and summary["tasks"]["b"]["eval_f1"] > 0.85
    floor = summary["tasks"]["a"]["baseline_validation"]["accuracy"]
    assert floor < 0.7 and summary["steps"] == 6 * (8 + 6)
    assert summary["status"] == "finished" and all("status" not in about for about in summary["tasks"].values())
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    entry = next(entry for entry in history if "eval_mean" in entry)
    assert entry["eval_mean"] == pytest.approx((entry["eval_a_accuracy"] + entry["eval_b_f1"]) / 2)
    best = max(entry["eval_mean"] for entry in history if "eval_mean" in entry)
    assert (summary["tasks"]["a"]["eval_accuracy"] + summary["tasks"]["b"]["eval_f1"]) / 2 == pytest.approx(best)


def test_percents_count_as_fractions_in_the_mean(places, tmp_path):
    (tmp_path / "answers").mkdir()
    rows = {**places, "b": answering(tmp_path / "answers")}
    options = {"variant": "bert", "max_steps": 1, "max_length": 16}
    summary = several(rows, tmp_path / "run", {"a": "classification", "b": "qa"}, **options)
    figures = [summary["tasks"]["a"]["eval_accuracy"], summary["tasks"]["b"]["eval_f1"] / 100]
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert figures[1] > 0.01 and [entry["eval_mean"] for entry in history if "eval_mean" in entry] == [
        pytest.approx(np.mean(figures))
    ]


def evaluated(folder, name, capsys):
    """The figures of a task, by the command for one model."""
    capsys.readouterr()
    line = ["evaluate", "--model", str(folder), "--task", name, "--json", "--no_progress", "--use_cpu"]
    assert hf_xformers.cli.main(line) == 0
    return json.loads(capsys.readouterr().out)


def test_every_task_is_a_model_by_itself(run, places, capsys):
    folder, summary = run
    first, second = (load_file(folder / name / "model.safetensors") for name in BOTH)
    shared = first.keys() & second.keys()
    assert any(".layers.1." in name for name in shared) and not any("pooler" in name for name in second)
    assert all(torch.equal(first[name], second[name]) for name in shared if "classifier" not in name)
    loaded = load_tasks(folder).eval()
    assert loaded.heads["a"].base_model is loaded.heads["b"].base_model
    # The figures of the run, by the commands for one model.
    for name, metric in (("a", "accuracy"), ("b", "f1")):
        found = evaluated(folder, name, capsys)
        assert found[metric] == pytest.approx(summary["tasks"][name][f"eval_{metric}"])
    line = ["predict", "--model", str(folder), "--task", "b", "--text", "it was a fine day", "--no_progress"]
    assert hf_xformers.cli.main(line) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] == ["O", "O", "O", "B-GOOD", "O"]
    assert hf_xformers.cli.main(["predict", "--model", str(folder), "--text", "a"]) == 2
    assert "holds models for the tasks a, b; name one with --task" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name, balance", [("a", 0), ("b", 0.5)])
def test_one_task_is_a_run_of_it_alone(name, balance, places, tmp_path):
    """With dropout, and micro-batches: the same weights, bit by bit."""
    options = {**SAVES, "max_steps": 5, "learning_rate": 0.01, "per_device_train_batch_size": 4}
    options |= {"gradient_accumulation_steps": 2, "class_balance": balance}
    several(places, tmp_path / "several", {name: BOTH[name]}, **options)
    finetune(BOTH[name], places[name], tmp_path / "alone", model=places["bert"], **options)
    same_weights(tmp_path / "several" / name, tmp_path / "alone")


def test_rare_classes_of_one_task_count_more(places, tmp_path):
    """Of weights that stay as they are, the loss of each of its steps is another, and that of the other task's is
    not."""
    losses = {}
    for balance in (0, 0.9):
        folder = tmp_path / str(balance)
        found = several(places, folder, BOTH, "--class_balance", f"b={balance}", **LEARN | {"learning_rate": 0},
                        eval_strategy="no", load_best_model_at_end="false", logging_steps=1)  # fmt: skip
        history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        losses[balance] = [entry["loss"] for entry in history if "loss" in entry]
        assert "class_balance" not in found["tasks"]["a"] and found["tasks"]["b"].get("class_balance", 0) == balance
    assert Counter(one == other for one, other in zip(*losses.values(), strict=True)) == {True: 8, False: 6}


@pytest.mark.parametrize("name", ["a", "b"])
def test_auxiliary_losses_count_beside_class_weights(name, places, tmp_path):
    """Weights of nearly 1 change nothing, neither does it that the loss is then made of the logits."""
    options = {"variant": "switch_transformer", "gradient_accumulation_steps": 2, "max_steps": 1, "optim": "sgd"}
    options |= {**LEARN, "learning_rate": 1.0, "lr_scheduler_type": "constant", "warmup_steps": 0}
    options |= BARE
    more = ["--feedforward.balance_loss_weight", "1", "--per_device_train_batch_size", "4", "--feedforward.every", "1"]
    states = []
    for balance in ("0", "1e-9"):
        folder = tmp_path / balance
        several(places, folder, {name: BOTH[name]}, *more, "--class_balance", balance, **options)
        states.append(load_file(folder / name / "model.safetensors"))
    for key, value in states[0].items():
        torch.testing.assert_close(
            states[1][key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key} {text}"
        )


def test_a_resumed_run_ends_the_same(places, tmp_path):
    tasks = {**BOTH, "c": "regression"}
    options = {**SAVES, "num_train_epochs": 2, "learning_rate": 0.01, "sampling": "sqrt", "variant": "bert"}
    options |= {"self_ensemble": "sda", "layer_decay": 1.5, "unfreeze_every": 1, "save_steps": 5}
    whole = several(places, tmp_path / "whole", tasks, **options)
    cut = cut_after(5, tmp_path / "whole", tmp_path / "cut", *tasks)
    again = several(places, cut, tasks, "--resume_from_checkpoint", **options)
    assert again["steps"] == whole["steps"] > 5
    for name in tasks:
        same_weights(cut / name, tmp_path / "whole" / name)


def test_uncertain_rows_are_trained_on(places, tmp_path):
    """Both tasks are learned, a stopped run ends the same, and a step's loss is that of the rows that it chose."""
    options = {**SAVES, "num_train_epochs": 3, "save_steps": 30, "sampling": "uncertainty", **LEARN}
    whole = several(places, tmp_path / "whole", BOTH, **options)
    assert whole["steps"] == 3 * (8 + 6) and whole["sampling"] == "uncertainty"
    assert whole["tasks"]["a"]["eval_accuracy"] > 0.8 and whole["tasks"]["b"]["eval_f1"] > 0.4
    cut = cut_after(41, tmp_path / "whole", tmp_path / "cut", *BOTH)
    several(places, cut, BOTH, "--resume_from_checkpoint", **options)
    for name in BOTH:
        same_weights(cut / name, tmp_path / "whole" / name)


def test_batches_over_processes():
    """The parts of a step's batch follow each other; the first rows fill up the last part."""
    whole, parts = TaskBatchSampler([13, 8], 4, seed=3), TaskBatchSampler([13, 8], 2, seed=3, processes=2)
    assert len(parts) == 2 * len(whole)
    steps = list(parts)
    for step, batch in enumerate(whole):
        first, second = steps[2 * step : 2 * step + 2]
        assert [*first, *second][: len(batch)] == batch and len(first) == len(second)
        assert set(first) | set(second) == set(batch)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(places, tmp_path):
    tasks = dict.fromkeys("ab", "classification")  # a mean over tags is not that of its halves
    line = argv({**places, "b": places["a"]}, tmp_path / "unused", tasks, max_steps=6, optim="sgd", **LEARN, **BARE)
    for option in ("--output_dir", "--per_device_train_batch_size"):
        place = line.index(option)
        del line[place : place + 2]
    (tmp_path / "line.json").write_text(json.dumps(line))
    run_jobs("tests.finetuning.multi_task_jobs", ["several_tasks"], tmp_path)
    one, two = (result(tmp_path, "several_tasks", world) for world in (1, 2))
    for name in tasks:
        for key, value in one["state"][name].items():
            torch.testing.assert_close(two["state"][name][key], value, rtol=1e-3, atol=1e-5)
        for metric in ("accuracy", "f1", "loss"):
            found = [run["summary"]["tasks"][name][f"eval_{metric}"] for run in (one, two)]
            assert found[1] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.parametrize("method", ["lora", "pfeiffer"])
def test_tasks_share_an_adapter(method, places, tmp_path, capsys):
    """The base stays as it is; every task's folder has the same adapter, its own head, and predicts by itself."""
    earlier = [tmp_path / "run" / "config.json", tmp_path / "run" / "a" / "config.json"]  # of runs of another kind
    for path in earlier:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    summary = several(places, tmp_path / "run", BOTH, peft=method, max_steps=6, **LEARN)
    assert summary["peft"] == method and summary["trained_parameters"] < summary["parameters"] / 2
    files = {"lora": "adapter_model.safetensors", "pfeiffer": "bottleneck.safetensors"}
    first, second = (load_file(tmp_path / "run" / name / files[method]) for name in BOTH)
    assert not any(path.exists() for path in earlier)
    shared = [key for key in first.keys() & second.keys() if "classifier" not in key]
    assert shared and all(torch.equal(first[key], second[key]) for key in shared)
    assert any("pooler" in key for key in first) and not any("pooler" in key for key in second)
    assert all("trunk.embedding" not in key for key in first)
    for name in BOTH:
        loss = evaluated(tmp_path / "run", name, capsys)["loss"]
        assert loss == pytest.approx(summary["tasks"][name]["eval_loss"], rel=1e-4)
    with pytest.raises(ValueError, match="holds adapters"):
        load_tasks(tmp_path / "run")


def test_a_model_of_one_of_the_tasks_is_kept(run, places, capsys):
    line = argv(places, run[0], BOTH, model=run[0] / "a", overwrite_output_dir=True)
    assert hf_xformers.cli.main(line) == 2 and "would replace the model" in " ".join(capsys.readouterr().err.split())


def test_a_model_that_is_told_the_task(places, tmp_path, capsys):
    """CA-MTL's attention gets the number of the task, in training and from the commands for one task's model."""
    options = {"variant": "ca_mtl", "num_train_epochs": 2, "learning_rate": 0.01}
    line = argv(places, tmp_path / "run", BOTH, **options)
    assert hf_xformers.cli.main(line) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "the model knows 1 tasks, and 2 are named; give --attention.num_tasks 2" in said
    summary = several(places, tmp_path / "run", BOTH, "--attention.num_tasks", "2", **options)
    for number, name in enumerate(BOTH):
        assert summary["tasks"][name]["task_number"] == number
        loss = evaluated(tmp_path / "run", name, capsys)["loss"]
        assert loss == pytest.approx(summary["tasks"][name]["eval_loss"], rel=1e-5)
    head = load_tasks(tmp_path / "run").eval().heads["b"]
    first, second = (head(IDS, tasks=torch.full((2,), number)).logits for number in (0, 1))
    assert not torch.equal(first, second)


def test_a_pretrained_model_that_is_given_ca_mtl(places, tmp_path, capsys):
    """Its layers are converted, and a run of several tasks trains the parts that know the task."""
    parts = ["--stack", "ca_mtl", "--residual", "conditional_post_ln"]
    line = ["convert", "--from", str(places["bert"]), "--to", str(tmp_path / "told"), *parts, "--stack.num_tasks", "2"]
    assert hf_xformers.cli.main(line) == 0
    summary = several(places, tmp_path / "run", BOTH, model=tmp_path / "told", max_steps=3)
    assert [summary["tasks"][name]["task_number"] for name in BOTH] == [0, 1]
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("told", "run/a"))
    gain = "layers.1.attention_residual.gain.film.weight"
    for part in ("stack.task_table.weight", "stack.alignment.film.weight", gain):
        assert not torch.equal(before[f"model.trunk.{part}"], after[f"model.trunk.{part}"])


# ------------------------------------------------------------------------------------------------ the command line


def test_a_command_line_for_each_task():
    line = ["--task", "a=x", "--data", "a=1", "a=2", "b=3", "--lr", "1", "--task=b=y", "--label-column=b=t", "--fp16"]
    found = split_tasks([*line, "--note", "c=d"])
    assert found["a"] == ["--task", "x", "--data", "1", "2", "--lr", "1", "--fp16", "--note", "c=d"]
    assert found["b"] == ["--task", "y", "--data", "3", "--lr", "1", "--label-column", "t", "--fp16", "--note", "c=d"]
    assert split_tasks(["--task", "x", "--data", "a=1"]) is None


def test_a_file_of_several_tasks(places, tmp_path, capsys):
    """A run of the file is that of the command line; what stands there wins over the file."""
    said = {"task": BOTH, "data": {name: [str(file) for file in places[name]] for name in BOTH}}
    said |= {"model": str(places["bert"]), "per_device_train_batch_size": 8, "max_steps": 9, "sampling": "sqrt"}
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({**said, "use_cpu": True, "disable_tqdm": True}))
    line = ["finetune", str(tmp_path / "tasks.yaml"), "--output_dir", str(tmp_path / "file"), "--max_steps", "3"]
    assert hf_xformers.cli.main(line) == 0
    several(places, tmp_path / "line", BOTH, max_steps=3, sampling="sqrt")
    for name in BOTH:
        same_weights(tmp_path / "file" / name, tmp_path / "line" / name)
    found = split_file({"task": {"a": "x", "b": "y"}, "data": {"a": "1"}, "attention": {"type": "z"}, "seed": 1})
    assert found == {
        "a": {"task": "x", "data": "1", "attention": {"type": "z"}, "seed": 1},
        "b": {"task": "y", "attention": {"type": "z"}, "seed": 1},
    }
    assert split_file({"task": "x"}) is None
    with pytest.raises(ValueError, match="--max_steps is one for all tasks"):
        split_file({"task": {"a": "x", "b": "y"}, "max_steps": {"a": 9}})
    (tmp_path / "bad.yaml").write_text("task: {a/b: tagging}")
    assert hf_xformers.cli.main(["finetune", str(tmp_path / "bad.yaml"), "--output_dir", str(tmp_path / "x")]) == 2
    assert "'a/b' is to be the name of a folder" in " ".join(capsys.readouterr().err.split())


REFUSED = [
    ({"a": "classification"}, ["--task", "tagging"], {}, "--task tagging has no name besides the named tasks a"),
    ({"a": "classification"}, ["--task", "a=tagging"], {}, "there is a task 'a' already"),
    ({"a": "classification"}, ["--task", "a/b=tagging"], {}, "'a/b' is to be the name of a folder"),
    (
        {"a": "classification"},
        ["--task", "values=tagging"],
        {},
        "'values' is to be the name of a folder and of a head",
    ),
    ({"a": "classification"}, ["--task", "d=tagging"], {}, "task 'd' has no rows; give them with --data d=FILE"),
    ({"a": "clasification"}, [], {}, "unknown task 'clasification'"),
    (BOTH, [], {"sampling": "often"}, "--sampling 'often' is unknown; take one of proportional"),
    (BOTH, [], {"sampling_temperature": 0}, "--sampling_temperature 0 must be above 0"),
    (BOTH, [], {"sampling_temperature": 2}, "2.0 has no effect without --sampling temperature; give both"),
    ({**BOTH, "c": "regression"}, [], {"sampling": "uncertainty"}, "reads probabilities, and --task c=regression"),
    (BOTH, [], {"sampling": "uncertainty", "variant": "bert", "tag_decoder": "crf"}, "probabilities of single tags"),
    (BOTH, [], {"sampling": "uncertainty", "self_ensemble": "sda"}, "compares one answer; drop one"),
    (BOTH, [], {"peft": "prompt"}, "--peft prompt"),
    (BOTH, [], {"label_smoothing_factor": 0.1}, "--label_smoothing_factor is for one task at a time"),
    (BOTH, [], {"metric_for_best_model": "a_bleu"}, "'a_bleu' is not measured; choose one of mean, loss, a_accuracy"),
    (BOTH, ["--label_column", "b=nothing"], {}, "there is no column 'nothing'"),
    (BOTH, ["--learning_rate", "b=0.1"], {}, "--learning_rate is one for all tasks, and 'b' is one of them"),
    ({"a": "summarization"}, [], {"variant": "t5"}, "does not read a text once to classify it"),
]


@pytest.mark.parametrize("tasks, extra, options, message", REFUSED)
def test_refusals(tasks, extra, options, message, places, tmp_path, capsys):
    assert hf_xformers.cli.main(argv(places, tmp_path / "run", tasks, *extra, **options)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
