import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    TrainingArguments,
)

import hf_xformers.cli
from hf_xformers.objectives import build_objective
from hf_xformers.training import preparation
from hf_xformers.training.building import (
    build_config,
    choose_block_size,
    grown_positions,
    longest_input,
)
from hf_xformers.training.preparation import ModelChoice, Preparation, Prepared
from hf_xformers.training.pretraining import is_finished
from hf_xformers.training.text import TextData, load_splits, make_rows
from hf_xformers.variants import config_class, family
from tests.training.runs import SHAPE, flags, history, pretrain, same_run, summary, weights, write_text

AUTO = {"mlm": AutoModelForMaskedLM, "clm": AutoModelForCausalLM, "span": AutoModelForSeq2SeqLM}
FAMILY = {"mlm": "XFBertForMaskedLM", "clm": "XFGPT2ForCausalLM", "span": "XFT5ForSeq2SeqLM"}
SPAN = {"vocab_size": 460}  # the sentinels need a hundred


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """One model of each objective; learning rate and steps so that it learns the pattern of the text."""
    folder = tmp_path_factory.mktemp("trained")
    variants = {"mlm": "bert", "clm": "gpt2", "span": "t5"}
    settings = {"eval_strategy": "steps", "eval_steps": 40, "eval_on_start": "true", "learning_rate": 0.01}
    return {
        objective: pretrain(
            text,
            folder / objective,
            variant=variant,
            max_steps=40,
            hidden_dropout_prob=0.0,
            **{**settings, **(SPAN if objective == "span" else {})},
        )
        for objective, variant in variants.items()
    }


@pytest.mark.parametrize("objective", list(AUTO))
def test_training_lowers_the_held_out_loss(trained, objective):
    losses = [entry["eval_loss"] for entry in history(trained[objective]) if "eval_loss" in entry]
    # T5 begins with logits of variance 1, over which the mean loss is log V + 1/2.
    assert losses[0] == pytest.approx(math.log(360) if objective != "span" else math.log(460) + 0.5, rel=0.1)
    assert losses[-1] < losses[0] - 0.7
    assert summary(trained[objective])["objective"]["type"] == objective


@pytest.mark.parametrize("objective", list(AUTO))
def test_what_is_saved_loads_through_the_auto_classes(trained, objective):
    folder = trained[objective]
    model = AUTO[objective].from_pretrained(folder).eval()
    assert type(model).__name__ == FAMILY[objective]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == summary(folder)["vocabulary"] <= model.config.vocab_size
    assert model.config.pad_token_id == tokenizer.pad_token_id
    if objective == "mlm":
        names = {path.name for path in folder.iterdir()}
        assert {"model.safetensors", "config.json", "tokenizer.json", "trainer_state.json"} <= names
        assert not [name for name in names if name.endswith((".bin", ".pt", ".tmp")) or name.startswith(".")]
        return
    if objective == "clm":  # a text begins with what ends a document
        assert tokenizer.bos_token_id == tokenizer.eos_token_id == model.config.bos_token_id
        assert tokenizer("karan")["input_ids"] == tokenizer("karan", add_special_tokens=False)["input_ids"]
    else:  # decoder inputs begin as in training
        assert model.config.decoder_start_token_id == model.config.pad_token_id
    assert (folder / "generation_config.json").is_file()
    ids = model.generate(**tokenizer("karan losel", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert ids.shape[1] > 1
    assert model.config.use_cache is True


@pytest.mark.parametrize("objective", list(AUTO))
def test_evaluate_is_the_loss_of_the_model_on_the_rows(trained, objective, capsys):
    """Computed again from the saved parts: rows, static noise, one row at a time, log softmax in float64. It is also
    what the run's last evaluation says."""
    folder = trained[objective]
    argv = ["evaluate", "--model", str(folder), "--json", "--per_device_eval_batch_size", "3"]
    assert hf_xformers.cli.main([*argv, "--split", "all"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] > summary(folder)["validation_rows"]
    assert hf_xformers.cli.main(argv) == 0
    figures = json.loads(capsys.readouterr().out)
    spec = build_objective(summary(folder)["objective"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    splits = load_splits(TextData(**summary(folder)["data"]))
    rows = make_rows(splits["validation"], tokenizer, spec, 16, whole=True)
    collator = spec.collator(tokenizer, seed=42, static=True)
    model = AUTO[objective].from_pretrained(folder).eval()
    total = count = 0.0
    with torch.no_grad():
        for row in rows:
            batch = collator([row])
            labels = batch.pop("labels")[0]
            logits = model(**batch).logits[0].double()
            if objective == "clm":
                logits, labels = logits[:-1], labels[1:]
            chosen = labels != -100
            total -= float(torch.log_softmax(logits[chosen], -1).gather(1, labels[chosen][:, None]).sum())
            count += int(chosen.sum())
    assert figures["rows"] == len(rows) == summary(folder)["validation_rows"] and figures["tokens"] == count
    assert figures["loss"] == pytest.approx(total / count, rel=1e-5)
    last = [entry for entry in history(folder) if "eval_loss" in entry][-1]
    assert figures["loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(last["eval_loss"]), rel=1e-5)
    assert figures["accuracy"] == pytest.approx(last["eval_accuracy"])


# ------------------------------------------------------------------------------------------- seeds, tokenizers, starts


def test_the_seed_decides_everything(text, tmp_path):
    first, again, other = (pretrain(text, tmp_path / str(run), seed=seed) for run, seed in enumerate((1, 1, 2)))
    same_run(again, first)
    assert history(first) != history(other)


@pytest.mark.parametrize("setting, changes", [((), True), (("--objective.dupe_factor", "1"), False)])
def test_masks_change_from_epoch_to_epoch(text, tmp_path, setting, changes):
    """All rows in one batch, nothing learned and nothing dropped: only the masks can change the loss of an epoch."""
    options = {"num_train_epochs": 3, "max_steps": None, "per_device_train_batch_size": 1000, "logging_steps": 1}
    options |= {"learning_rate": 0.0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    output = pretrain(text, tmp_path / "run", *setting, **options)
    losses = [entry["loss"] for entry in history(output) if "loss" in entry]
    assert len(losses) == 3
    assert (losses[1] != pytest.approx(losses[0], rel=1e-5)) is changes
    assert (losses[2] != pytest.approx(losses[1], rel=1e-5)) is changes


def test_a_tokenizer_by_name_is_used_and_saved(trained, text, tmp_path):
    source = trained["mlm"]
    output = pretrain(text, tmp_path / "run", tokenizer=source, vocab_size=None)
    assert json.loads((output / "tokenizer.json").read_text()) == json.loads((source / "tokenizer.json").read_text())
    assert AutoConfig.from_pretrained(output).vocab_size == len(AutoTokenizer.from_pretrained(source))


def test_a_tokenizer_without_a_mask_gets_one(trained, text, tmp_path):
    bare = trained["clm"]
    assert AutoTokenizer.from_pretrained(bare).mask_token is None
    output = pretrain(text, tmp_path / "run", tokenizer=bare, vocab_size=None, objective="mlm")
    assert AutoTokenizer.from_pretrained(output).mask_token is not None


def test_init_from_takes_weights_tokenizer_and_configuration(trained, text, tmp_path):
    start = trained["mlm"]
    output = tmp_path / "run"
    argv = flags(init_from=start, data=text, output_dir=output, block_size=16, max_steps=1, learning_rate=0.0)
    argv += flags(save_strategy="no", disable_tqdm="true", hidden_dropout_prob=0.25, per_device_train_batch_size=4)
    assert hf_xformers.cli.main(["pretrain", *argv]) == 0
    assert all(torch.equal(tensor, weights(output)[name]) for name, tensor in weights(start).items())
    assert AutoConfig.from_pretrained(output).hidden_dropout_prob == 0.25
    assert summary(output)["size"] == "tiny"
    assert (output / "tokenizer.json").read_bytes() == (start / "tokenizer.json").read_bytes()


def test_init_from_keeps_the_components_of_a_free_mix(text, tmp_path):
    start = pretrain(text, tmp_path / "start", "--position", "rotary", "--position.theta", "77", max_steps=1)
    argv = flags(
        init_from=start, data=text, output_dir=tmp_path / "run", block_size=16, max_steps=1, save_strategy="no"
    )
    argv += ["--position.fraction", "0.5", "--disable_tqdm", "true"]
    assert hf_xformers.cli.main(["pretrain", *argv]) == 0
    position = AutoConfig.from_pretrained(tmp_path / "run").position
    assert (position.type, position.theta, position.fraction) == ("rotary", 77.0, 0.5)


def test_a_new_run_does_not_bury_an_old_one(text, tmp_path, capsys, monkeypatch):
    options = {"save_strategy": "steps", "save_steps": 1}
    output = pretrain(text, tmp_path / "run", **options)
    kept = sorted(path.name for path in output.glob("checkpoint-*"))
    assert kept == ["checkpoint-3", "checkpoint-4"]  # two of them
    argv = ["pretrain", *flags(**SHAPE, data=text, output_dir=output, block_size=16, max_steps=2)]
    assert hf_xformers.cli.main(argv) == 2
    assert "already holds checkpoint-4 of an earlier run" in capsys.readouterr().err
    argv += ["--overwrite_output_dir", "--data", str(tmp_path / "mistyped.txt")]
    assert hf_xformers.cli.main(argv) == 2 and sorted(path.name for path in output.glob("checkpoint-*")) == kept
    before = {path: path.read_bytes() for path in output.iterdir() if path.is_file()}
    with monkeypatch.context() as patch:  # refused when a tokenizer of another size is there already
        patch.setattr(preparation, "make_rows", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pretrain(text, output, "--overwrite_output_dir", **options, vocab_size=300)
    assert {path: path.read_bytes() for path in output.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in output.iterdir() if path.is_dir()) == kept
    pretrain(text, output, "--overwrite_output_dir", **{**options, "max_steps": 2})
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_resume_refuses_another_run(text, tmp_path, capsys):
    options = {"save_strategy": "steps", "save_steps": 2}
    output = pretrain(text, tmp_path / "run", variant="bert", **options)

    def resume(**changes):
        base = {**SHAPE, "variant": "bert", "data": text, "output_dir": output, "block_size": 16, "max_steps": 6}
        argv = flags(**{**base, **changes}, per_device_train_batch_size=4, resume_from_checkpoint=True)
        assert hf_xformers.cli.main(["pretrain", *argv]) == 2
        return capsys.readouterr().err

    assert "is of variant 'xf_bert', and this command asks for 'xf_roberta'" in resume(variant="roberta")
    assert "has intermediate_size 32, and this command asks for 64" in resume(intermediate_size=64)
    assert "had block_size 16, and this command gives 12" in resume(block_size=12)
    other = write_text(tmp_path / "other.txt", lines=60)
    assert "had train_rows" in resume(data=other)
    shutil.rmtree(output / "checkpoint-4")
    shutil.rmtree(output / "checkpoint-2")
    assert "holds no complete checkpoint to resume from" in resume()


def test_without_validation_text_there_is_no_evaluation(text, tmp_path):
    output = pretrain(text, tmp_path / "run", validation_fraction=0.0, eval_strategy="steps", eval_steps=1)
    assert summary(output)["validation_rows"] == 0
    assert not [entry for entry in history(output) if "eval_loss" in entry]


def test_a_text_shorter_than_a_row_is_trained_on_all_the_same(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("karan losel\nmitor nevin\n")
    output = pretrain(short, tmp_path / "run", max_steps=1)
    assert summary(output)["train_rows"] == 1


# ------------------------------------------------------------------------------------------------ small parts


@pytest.mark.parametrize(
    "step, options, done",
    [
        (8, {}, True),
        (8, {"num_train_epochs": 3}, False),
        (5, {}, False),
        (5, {"max_steps": 5}, True),
    ],
)
def test_the_end_of_a_run_is_that_of_its_epochs(step, options, done, tmp_path):
    """However many steps these have: processes may read the same rows."""
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"global_step": step, "max_steps": 8, "epoch": step / 4, "num_train_epochs": 2})
    )
    prepared = Prepared(None, None, None, range(8), None, {"sequence_parallel": True}, tmp_path)
    given = {"max_steps": -1, "num_train_epochs": 2, **options}
    assert is_finished(prepared, SimpleNamespace(**given)) is done


def test_default_rows_fit_the_positions():
    span = build_objective("span")
    config = build_config(config_class("bart"), "tiny", span, fields={"max_position_embeddings": 50})
    assert choose_block_size(config, span, "tiny", None) == 50
    free = build_config(config_class("t5"), "tiny", span)
    assert choose_block_size(free, span, "tiny", 1000) == 1000


@pytest.mark.parametrize("attention", ["linformer", "synthesizer"])
@pytest.mark.parametrize("where", ["max_length", "max_position_embeddings"])
def test_rows_fit_the_places_of_attention(attention, where):
    """Sinusoids have no limit of their own."""
    mlm = build_objective("mlm")
    spec = {"type": attention, **({"max_length": 40} if where == "max_length" else {})}
    fields = {"max_position_embeddings": 40} if where == "max_position_embeddings" else {}
    components = {"attention": spec, "position": "sinusoidal_absolute"}
    config = build_config(config_class("xformer"), "tiny", mlm, components=components, fields=fields)
    assert longest_input(config) == 40 and choose_block_size(config, mlm, "tiny", None) == 40
    with pytest.raises(ValueError, match=f"attention '{attention}' has places for only 40"):
        choose_block_size(config, mlm, "tiny", 41)


@pytest.mark.parametrize("name", ["bert", "esm", "luke", "mpnet", "roberta"])
def test_longest_input_of_transformers(name):
    """Behind the padding id, positions take two rows of the table for no token."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(name, **sizes, intermediate_size=8, max_position_embeddings=12, pad_token_id=1)
    model, longest = AutoModel.from_config(config).eval(), longest_input(config)
    assert model(torch.full((1, longest), 5)).last_hidden_state.shape[1] == longest
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)|must match"):
        model(torch.full((1, longest + 1), 5))


def test_targets_count_as_well():
    span = build_objective({"type": "span", "noise_density": 0.8, "mean_noise_span_length": 30.0})
    config = build_config(config_class("bart"), "tiny", span, fields={"max_position_embeddings": 64})
    with pytest.raises(ValueError, match="rows of --block_size 60 make sequences of"):
        choose_block_size(config, span, "tiny", 60)


def test_positions_grow_to_the_rows_of_a_new_model(text, tmp_path):
    def prepared(**options):
        choice = ModelChoice(variant=options.pop("variant", "performer"), block_size=options.pop("block_size", 600))
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, max_steps=1)
        return Preparation(choice, TextData(data=[str(text)]), args, **options)

    assert prepared().config.max_position_embeddings == 600
    assert prepared(block_size=500).config.max_position_embeddings == 512  # as the variant has it
    rotary = prepared(variant="xformer", components={"position": "rotary"}).config
    assert rotary.max_position_embeddings == 600  # what other parts read, such as the columns of Linformer
    assert prepared(fields={"max_position_embeddings": 700}).config.max_position_embeddings == 700
    with pytest.raises(ValueError, match="covers only 512"):
        prepared(fields={"max_position_embeddings": 512})


@pytest.mark.parametrize("variant", ["performer", "linformer", "longformer", "delta_net", "funnel_transformer"])
def test_grown_positions_hold_the_row(variant):
    cls = config_class(variant)
    objective = build_objective("mlm" if "ForMaskedLM" in cls.heads else "clm")
    fields = grown_positions(build_config(cls, "tiny", objective), 5000)
    grown = build_config(cls, "tiny", objective, fields=fields)
    limit = longest_input(grown)
    assert grown.max_position_embeddings >= 5000 and (limit is None or limit >= 5000)
    assert grown_positions(grown, 5000) == {}


def test_maps_of_hash_layers_come_from_the_text(text, tmp_path, capsys):
    """A balanced map is made of the rows' tokens; one of vectors is asked for before training."""
    options = {"variant": "hash_layers", "feedforward.num_experts": 4, "max_steps": 1}
    balanced = pretrain(text, tmp_path / "balanced", **options, **{"feedforward.hash": "balanced"})
    table = next(value for name, value in weights(balanced).items() if name.endswith("feedforward.table"))
    layer = family("xf_hash_layers")["ForMaskedLM"].from_pretrained(balanced).model.trunk.layers[1].feedforward
    assert torch.equal(layer.table, table) and not layer.unfilled
    with pytest.raises(AssertionError):  # the command fails
        pretrain(text, tmp_path / "clustered", **options, **{"feedforward.hash": "clustered"})
    assert "cluster(model, trained_model)" in capsys.readouterr().err
