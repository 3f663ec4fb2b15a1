"""Rates by layer, gradual unfreezing, the slanted triangular schedule: their definitions, what a run does with them,
resuming, refusals."""

import shutil
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification
from transformers.trainer_callback import TrainerState

import hf_xformers.cli
from hf_xformers.data import train_tokenizer
from hf_xformers.finetuning.layerwise import GradualUnfreezing, LayerGroups, slanted_share, spread_rates
from hf_xformers.variants import config_class, family
from tests.finetuning.task_data import classification, command, finetune, sentences
from tests.training.runs import SHAPE

PLAIN = {"load_best_model_at_end": "false", "eval_strategy": "no", "learning_rate": 0.01}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return classification(tmp_path_factory.mktemp("classification"), count=32)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A pretrained encoder with its tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    torch.manual_seed(0)
    tokenizer = train_tokenizer([text for text, _ in sentences(64, 0)], vocab_size=300, num_sentinels=0)
    config = config_class("bert")(**{**SHAPE, "vocab_size": 300, "max_position_embeddings": 32})
    family("bert")["ForMaskedLM"](config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------ definitions


@pytest.mark.parametrize("steps, cut_frac, ratio", [(100, 0.1, 32), (50, 0.2, 32), (40, 0.25, 8)])
def test_slanted_triangular_rate(steps, cut_frac, ratio):
    """Equation 3 of the paper, where the cut is a whole number of steps."""
    cut = int(steps * cut_frac)
    for t in range(steps + 1):
        p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / cut_frac - 1))
        assert slanted_share(t, steps, cut_frac, ratio) == pytest.approx((1 + p * (ratio - 1)) / ratio, abs=1e-12)
    assert slanted_share(0, steps, cut_frac, ratio) == pytest.approx(1 / ratio)
    assert slanted_share(cut, steps, cut_frac, ratio) == 1.0


@pytest.mark.parametrize("steps", [1, 2, 9, 15, 19, 101])
def test_slanted_triangular_rate_of_any_number_of_steps(steps):
    """It ends where it began, and is never outside, however the cut falls."""
    shares = [slanted_share(t, steps) for t in range(steps + 1)]
    assert all(1 / 32 - 1e-12 <= share <= 1 for share in shares) and shares[-1] == pytest.approx(1 / 32)
    assert max(shares) == 1.0


def small(variant, head, **fields):
    torch.manual_seed(0)
    sizes = {**SHAPE, "vocab_size": 60, "max_position_embeddings": 32, "num_hidden_layers": 3}
    return family(variant)[head](config_class(variant)(**{**sizes, **fields}))


def depths(model):
    groups = LayerGroups(model)
    return {name: groups.depth(parameter) for name, parameter in model.named_parameters()}, groups.top


def test_groups_of_layers():
    found, top = depths(small("bert", "ForSequenceClassification"))
    assert top == 4
    for name, depth in found.items():
        below = ".embedding." in name or ".position." in name
        layer = int(name.partition(".layers.")[2].partition(".")[0]) + 1 if ".layers." in name else top
        assert depth == (0 if below else layer), name
    assert set(found.values()) == set(range(5))

    theirs = BertForSequenceClassification(
        BertConfig(hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=3, vocab_size=60)
    )
    found, top = depths(theirs)
    assert found["bert.embeddings.LayerNorm.weight"] == 0 and found["bert.encoder.layer.2.output.dense.bias"] == 3
    assert found["bert.pooler.dense.weight"] == found["classifier.bias"] == top == 4

    found, top = depths(small("t5", "ForSeq2SeqLM", num_decoder_layers=2, tie_word_embeddings=True))
    assert top == 6
    for name, depth in found.items():
        if "trunk.layers.1." in name:
            assert depth == 2
        if "decoder.layers.0." in name:
            assert depth == 4
    # A table that is the head's, too, learns with the head.
    found, top = depths(small("gpt2", "ForCausalLM"))
    assert found["model.trunk.embedding.tokens.weight" if "model.trunk.embedding.tokens.weight" in found else
                 next(name for name in found if "embedding" in name)] == top  # fmt: skip


def test_rates_by_layer():
    model = small("bert", "ForSequenceClassification")
    groups = LayerGroups(model)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    both = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(both, lr=0.5)
    spread_rates(optimizer, groups, 2.6)
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            seen.add(name)
            outside = ".embedding." in name or ".position." in name
            below = 4 if outside else 3 - int(name.split(".")[3]) if ".layers." in name else 0
            assert group["lr"] == pytest.approx(0.5 / 2.6**below), name
            assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)
    assert seen == set(names.values())
    assert optimizer.param_groups[0]["lr"] == 0.5  # what is logged, and what other schedules go by


# ------------------------------------------------------------------------------------------------ runs


def weights(place):
    return load_file(place / "model.safetensors")


@pytest.mark.parametrize("every", [1, 0.5])
def test_layers_join_from_the_top(bert, data, tmp_path, every):
    """After k times so many epochs the head and k - 1 layers differ from where they began, and nothing else does."""
    options = {**PLAIN, "model": bert, "num_train_epochs": 3 * every, "unfreeze_every": every, "weight_decay": 0.1,
               "save_strategy": "steps", "save_steps": int(4 * every), "save_total_limit": 9}  # fmt: skip
    summary = finetune("text-classification", data, tmp_path / "run", **options)
    start = weights(bert)
    for count in (1, 2, 3):
        checkpoint = tmp_path / "run" / f"checkpoint-{int(4 * every * count)}"
        now = weights(checkpoint)
        moved = {name for name, value in now.items() if name in start and not torch.equal(value, start[name])}
        layers = {int(name.split(".")[3]) for name in moved if ".layers." in name}
        assert layers == set(range(2 - (count - 1), 2)), (count, layers)
        assert not any(".embedding." in name for name in moved)
        states = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
        learned = sum(state["exp_avg"].numel() for state in states.values())
        untouched = sum(value.numel() for name, value in now.items() if name in start and name not in moved)
        assert learned == sum(value.numel() for value in now.values()) - untouched
    assert summary["trained_parameters"] < summary["parameters"] and summary["unfreeze_every"] == every


@pytest.mark.parametrize("every, steps", [(0.1, 10), (0.3, 10), (0.7, 10), (1 / 3, 9), (0.14, 50)])
def test_parts_of_an_epoch_are_counted_in_whole_steps(every, steps):
    """0.3 epochs are three times 0.1, although 0.3 / 0.1 is below 3 in binary."""
    unfreezing = GradualUnfreezing(LayerGroups(small("bert", "ForSequenceClassification")), every)
    for done in range(1, 3 * steps):
        state = TrainerState(epoch=done // steps + done % steps / steps)
        unfreezing.on_step_begin(None, state, None)
        assert unfreezing.lowest == max(0, 4 - int(Fraction(done, steps) / Fraction(every).limit_denominator(100)))


def test_nothing_to_divide_by_is_plain(bert, data, tmp_path):
    options = {**PLAIN, "model": bert, "max_steps": 6}
    finetune("text-classification", data, tmp_path / "plain", **options)
    finetune("text-classification", data, tmp_path / "one", layer_decay=1, **options)
    plain, one = weights(tmp_path / "plain"), weights(tmp_path / "one")
    assert all(torch.equal(one[name], value) for name, value in plain.items())


def test_a_resumed_run_ends_the_same(bert, data, tmp_path):
    """All three at once, cut within an epoch after a layer joined."""
    options = {**PLAIN, "model": bert, "num_train_epochs": 3, "unfreeze_every": 1, "layer_decay": 2.6, "save_steps": 3,
               "slanted_triangular": True, "save_strategy": "steps", "save_total_limit": 9}  # fmt: skip
    finetune("text-classification", data, tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (9, 12):
        shutil.rmtree(tmp_path / "cut" / f"checkpoint-{step}")
    (tmp_path / "cut" / "model.safetensors").unlink()
    again = {**options, "resume_from_checkpoint": True}
    summary = finetune("text-classification", data, tmp_path / "cut", **again)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(cut[name], value) for name, value in whole.items())
    history = torch.load(tmp_path / "whole" / "checkpoint-12" / "optimizer.pt", weights_only=True)["param_groups"]
    assert len({round(group["initial_lr"] / 0.01, 6) for group in history}) == 4 and summary["steps"] == 12
    code = hf_xformers.cli.main(
        ["finetune", *command("text-classification", data, tmp_path / "cut", **{**again, "layer_decay": 2})]
    )
    assert code == 2


REFUSED = [
    ({"layer_decay": 0.5}, "must be at least 1; give what to divide by, such as 2"),
    ({"layer_decay": -1}, "must be at least 1; give what to divide by"),
    ({"unfreeze_every": 0}, "--unfreeze_every 0 is a number of epochs; give one above 0"),
    ({"unfreeze_every": -0.5}, "--unfreeze_every -0.5 is a number of epochs; give one above 0"),
    ({"cut_frac": 1.0}, "--cut_frac 1 is a share of the steps"),
    ({"slanted_ratio": 0.5}, "--slanted_ratio 0.5 must be at least 1"),
    ({"slanted_triangular": True, "vaswani_lr_scale": 1, "warmup_steps": 4}, "two schedules of the rate; drop one"),
    ({"unfreeze_every": 1, "peft": "lora"}, "--peft lora keeps all layers frozen"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_refusals(options, message, bert, data, tmp_path, capsys):
    argv = command("text-classification", data, tmp_path / "run", **{"model": bert, **options})
    assert hf_xformers.cli.main(["finetune", *argv]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
