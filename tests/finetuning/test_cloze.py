"""UniLM on pairs of source and target: rows, masks, what is written, whole runs of the commands."""

import json

import pytest
import torch
from transformers import AutoTokenizer

import hf_xformers.cli
from hf_xformers import XFBertConfig, XFUniLMConfig, XFUniLMForClozeWriting
from hf_xformers.families import CLASSES
from hf_xformers.modeling.cloze_writing import write_targets
from tests.finetuning.task_data import command, finetune, predictions, summarization, translation
from tests.helpers import NO_DROPOUT, make_strong, pad, tokens
from tests.training.runs import cut_after, same_weights

SIZES = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
IDS = dict(mask_token_id=4, sep_token_id=3, pad_token_id=0)
PAIR = 3


def build(**fields):
    torch.manual_seed(0)
    return make_strong(XFUniLMForClozeWriting(XFUniLMConfig(**{**SIZES, **NO_DROPOUT, **IDS, **fields})), amount=0.4)


@pytest.mark.parametrize("types", [6, 2])
def test_writing_reads_sources_alone(types):
    """A target in the row is not read; ids end as those of an encoder-decoder do."""
    model = build(type_vocab_size=types).double().eval()
    sources = [tokens(size, low=5, seed=size) for size in (5, 3)]
    ids, mask = pad(sources, 6, "left")
    made = model.generate(ids, mask, max_new_tokens=4)
    expected = write_targets(model, ids, mask, mask_token_id=4, ends=(3,), max_new_tokens=4)
    for row, written in zip(made.tolist(), expected, strict=True):
        ended = [3, *written, *([3] if len(written) < 4 else [])]
        assert row == ended + [0] * (made.shape[1] - len(ended)) and len(row) <= 5
    ids, mask = pad([torch.cat([source, tokens(3, low=5)]) for source in sources], 9, "right")
    modes = torch.tensor([[PAIR, 5], [PAIR, 3]])
    assert torch.equal(model.generate(ids, mask, modes, max_new_tokens=4), made)
    assert torch.equal(model.generate(ids, mask, modes, max_new_tokens=4, use_cache=False), made)
    with pytest.raises(ValueError, match="writes the likeliest token each time, got do_sample=False and num_beams=4"):
        model.generate(ids, num_beams=4)
    with pytest.raises(ValueError, match="set `mask_token_id`"):
        build(mask_token_id=None).generate(ids)
    with pytest.raises(ValueError, match="the model has stack 'plain'; take a model with stack 'mask_modes'"):
        CLASSES["ForClozeWriting"](XFBertConfig(**SIZES))


LEARN = {"learning_rate": 0.01, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def test_translation_end_to_end(tmp_path, capsys):
    """From random weights: a run learns, goes on exactly from a checkpoint, and `predict` writes what it wrote."""
    (tmp_path / "data").mkdir()
    data, out = translation(tmp_path / "data"), tmp_path / "run"
    options = {"variant": "unilm", **LEARN, "num_train_epochs": 3, "load_best_model_at_end": "false"}
    finetune("translation", data, out, **options)
    log = json.loads((out / "trainer_state.json").read_text())["log_history"]
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    config = json.loads((out / "config.json").read_text())
    words = AutoTokenizer.from_pretrained(out)
    assert config["architectures"] == ["XFUniLMForClozeWriting"] and config["mask_token_id"] == words.mask_token_id
    cut = cut_after(log[-1]["step"] - 1, out, tmp_path / "cut")
    finetune("translation", data, cut, "--resume_from_checkpoint", **options)
    same_weights(cut, out)
    kept = predictions(out)
    texts = [row["source"] for row in kept]
    capsys.readouterr()
    assert hf_xformers.cli.main(["predict", "--model", str(out), "--no_progress", "--use_cpu", "--text", *texts]) == 0
    said = [json.loads(line)["prediction"] for line in capsys.readouterr().out.splitlines()]
    assert any(said) and said == [row["prediction"] for row in kept]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"generation_num_beams": 4}, "--generation_num_beams 4 searches with an encoder-decoder"),
        ({"max_length": 60, "max_target_length": 12, "max_position_embeddings": 64}, "stand in one row; shorten one"),
        ({"variant": "bert"}, "variant 'xf_bert' has no ForSeq2SeqLM class"),
    ],
)
def test_refusals(given, message, tmp_path, capsys):
    line = command("summarization", summarization(tmp_path), tmp_path / "run", **{"variant": "unilm", **given})
    assert hf_xformers.cli.main(["finetune", *line]) == 2
    assert message in capsys.readouterr().err
