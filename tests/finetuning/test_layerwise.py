"""Rates by layer, gradual unfreezing, the slanted triangular schedule: their definitions, what a run does with them,
resuming, refusals."""

from fractions import Fraction

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers.trainer_callback import TrainerState

import hf_xformers.cli
from hf_xformers.finetuning.layerwise import GradualUnfreezing, LayerGroups, slanted_share, spread_rates
from hf_xformers.variants import config_class, family
from tests.finetuning.task_data import BARE, classification, command, finetune, pretrained
from tests.training.runs import SHAPE, cut_after, same_weights, weights

PLAIN = {**BARE, "learning_rate": 0.01}
SAVES = {"save_strategy": "steps", "save_total_limit": 9}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return classification(tmp_path_factory.mktemp("classification"), count=32)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp("models") / "bert")


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
    assert next(depth for name, depth in found.items() if "embedding" in name) == top


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


@pytest.mark.parametrize("every", [1, 0.5])
def test_layers_join_from_the_top(bert, data, tmp_path, every):
    """After k times so many epochs the head and k - 1 layers differ from where they began, and nothing else does."""
    options = {**PLAIN, **SAVES, "model": bert, "num_train_epochs": 3 * every, "unfreeze_every": every}
    options |= {"weight_decay": 0.1, "save_steps": int(4 * every)}
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


def test_a_resumed_run_ends_the_same(bert, data, tmp_path):
    """All three at once, cut within an epoch after a layer joined."""
    options = {**PLAIN, **SAVES, "model": bert, "num_train_epochs": 3, "unfreeze_every": 1, "layer_decay": 2.6}
    options |= {"save_steps": 3, "slanted_triangular": True}
    finetune("text-classification", data, tmp_path / "whole", **options)
    cut = cut_after(6, tmp_path / "whole", tmp_path / "cut")
    again = {**options, "resume_from_checkpoint": True}
    summary = finetune("text-classification", data, cut, **again)
    same_weights(cut, tmp_path / "whole")
    history = torch.load(tmp_path / "whole" / "checkpoint-12" / "optimizer.pt", weights_only=True)["param_groups"]
    assert len({round(group["initial_lr"] / 0.01, 6) for group in history}) == 4 and summary["steps"] == 12
    argv = command("text-classification", data, cut, **{**again, "layer_decay": 2})
    assert hf_xformers.cli.main(["finetune", *argv]) == 2


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
