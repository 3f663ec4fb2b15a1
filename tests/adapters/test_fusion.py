"""Fusions of adapters: the equation by a loop, equal adapters, what is trained, saving, loading, refusals."""

import pytest
import torch
from torch import nn

import hf_xformers.cli
from hf_xformers.adapters import (
    activate,
    adapter_names,
    add_adapter,
    add_fusion,
    load_adapter,
    remove_adapter,
    save_adapter,
)
from tests.adapters.test_bottleneck import WIDTH, logits, make, shake


def with_adapters(count=3, **fields):
    model = make(**fields)
    for index in range(count):
        add_adapter(model, f"a{index}", "pfeiffer", bottleneck=2 + index, init_scale=0.5)
        shake(model, index)
    return model


@pytest.mark.parametrize(
    "count, variant, head", [(2, "bert", "ForSequenceClassification"), (3, "gpt2", "ForCausalLM")]
)
def test_equal_adapters_are_one(count, variant, head, tmp_path):
    """W_v is the identity at first, and whatever the weights, they sum to 1."""
    model = make(variant, head)
    add_adapter(model, "a", "pfeiffer", init_scale=0.5)
    activate(model, None)  # its head plays no part in a fusion
    save_adapter(model, tmp_path, "a")
    for index in range(count - 1):
        load_adapter(model, tmp_path, f"b{index}")
    one = logits(model)
    add_fusion(model, "all", ["a", *(f"b{index}" for index in range(count - 1))])
    torch.testing.assert_close(logits(model), one, rtol=1e-5, atol=1e-6)
    activate(model, None)
    assert not torch.allclose(logits(model), one)


def test_by_hand():
    """One layer, token by token and adapter by adapter: LN(s + sum_n p_n W_v a_n(u)) with u = LN(s)."""
    model = with_adapters(hidden_dropout_prob=0.0)
    add_fusion(model, "all", ["a0", "a2", "a1"])
    shake(model, 9)
    frame = model.model.trunk.layers[0].feedforward_residual
    fusion = frame.adapter_fusions["all"]
    layer, seen = model.model.trunk.layers[0], {}
    layer.feedforward.register_forward_hook(lambda m, args, out: seen.update(x=args[0], f=out.output))
    layer.register_forward_hook(lambda module, args, kwargs, out: seen.update(y=out[0]), with_kwargs=True)
    logits(model)

    def norm(h):
        return nn.functional.layer_norm(h, (WIDTH,), frame.norm.weight, frame.norm.bias, frame.norm.eps)

    s = seen["x"] + seen["f"]
    expected = torch.empty_like(s)
    for row in range(s.shape[0]):
        for place in range(s.shape[1]):
            u = norm(s[row, place])
            outputs = []
            for name in ("a0", "a2", "a1"):
                a = frame.norm_adapters[name]
                inner = torch.relu(a.down.weight @ u + a.down.bias)
                outputs.append(a.up.weight @ inner + a.up.bias)
            query = fusion.query.weight @ u + fusion.query.bias
            scores = torch.stack([query @ (fusion.key.weight @ o + fusion.key.bias) for o in outputs])
            chances = scores.exp() / scores.exp().sum()
            mixed = sum(p * (fusion.value.weight @ o) for p, o in zip(chances, outputs))
            expected[row, place] = norm(s[row, place] + mixed)
    torch.testing.assert_close(seen["y"], expected, rtol=1e-4, atol=1e-5)


def test_what_is_trained():
    model = with_adapters(2)
    add_fusion(model, "all", ["a0", "a1"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    inside = {name for name in trained if "adapter_fusions" in name}
    assert {name.rpartition(".")[0] for name in trained - inside} == {"classifier", "model.pooler.dense"}
    size = sum(p.numel() for name, p in model.named_parameters() if name in inside)
    assert size == 2 * (3 * WIDTH * WIDTH + 2 * WIDTH)  # in each of two layers
    model(input_ids=torch.arange(5, 23).reshape(2, 9), labels=torch.tensor([0, 2])).loss.backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trained


def test_saved_and_loaded_alone(tmp_path):
    """A fusion brings its adapters along, beside others of the same names; the base and the rest stay as they are."""
    model = with_adapters(2)
    results = {}
    for name in ("a0", "a1", None):
        activate(model, name)
        results[name] = logits(model)
    add_fusion(model, "all", ["a0", "a1"])
    shake(model, 7)
    results["all"] = logits(model)
    for name in ("a1", None, "all", "a0"):
        activate(model, name)
        assert torch.equal(logits(model), results[name])
    save_adapter(model, tmp_path / "all", "all")
    fresh = make()
    base = logits(fresh)
    assert load_adapter(fresh, tmp_path / "all") == "all" and torch.equal(logits(fresh), results["all"])
    other = with_adapters(1, seed=0)
    own = logits(other)
    load_adapter(other, tmp_path / "all", "again")
    assert torch.equal(logits(other), results["all"]) and adapter_names(other) == ["a0", "again_a0", "a1", "again"]
    activate(other, "a0")
    assert torch.equal(logits(other), own)
    remove_adapter(fresh, "all")
    activate(fresh, None)
    assert torch.equal(logits(fresh), base) and adapter_names(fresh) == ["a0", "a1"]


def test_from_folders_of_other_tasks(tmp_path):
    """Adapters of a classifier of three classes and of a tagger go into a classifier."""
    first, second = make(), make(head="ForTokenClassification")
    for model, place in ((first, "a"), (second, "b")):
        add_adapter(model, "default", "pfeiffer", init_scale=0.5)
        save_adapter(model, tmp_path / place)
    model = make()
    add_fusion(model, "all", [str(tmp_path / "a"), tmp_path / "b"])
    assert adapter_names(model) == ["all_0", "all_1", "all"]
    mine = dict(model.named_parameters())
    for name, value in second.named_parameters():
        if ".norm_adapters.default." in name:
            assert torch.equal(mine[name.replace(".default.", ".all_1.")], value)


def test_what_is_refused(tmp_path):
    model = with_adapters(2)
    add_adapter(model, "h", "houlsby")
    add_adapter(model, "n", "pfeiffer", train_norms=True)
    add_fusion(model, "both", ["a0", "a1"])
    before, names = logits(model), adapter_names(model)
    save_adapter(model, tmp_path / "a0", "a0")
    for call, words in (
        (lambda: add_fusion(model, "all", ["a0"]), "fewer than two; name more"),
        (lambda: add_fusion(model, "all", ["a0", "a0"]), "an adapter twice"),
        (lambda: add_fusion(model, "all", ["a0", "h"]), "'h' has kind 'houlsby'"),
        (lambda: add_fusion(model, "all", ["a0", "n"]), "'n' has norms of its own"),
        (lambda: add_fusion(model, "all", ["a0", "both"]), "'both' has kind 'fusion'"),
        (lambda: add_fusion(model, "all", [tmp_path / "a0", "nowhere"]), "no adapter 'nowhere' to fuse"),
        (lambda: add_fusion(model, "a0", ["a0", "a1"]), "has an adapter 'a0' already"),
        (lambda: remove_adapter(model, "a0"), "the fusion 'both' reads the adapter 'a0'"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
        assert torch.equal(logits(model), before) and adapter_names(model) == names


def test_another_width(tmp_path):
    from hf_xformers.variants import config_class, family

    model = make()
    add_adapter(model, "a", "pfeiffer", bottleneck=4)
    save_adapter(model, tmp_path)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    wide = family("bert")["ForSequenceClassification"](config_class("bert")(**sizes, vocab_size=60, num_labels=3))
    with pytest.raises(ValueError, match="is for a model of width 16, and this one's is 32; load its base"):
        load_adapter(wide, tmp_path)
    with pytest.raises(ValueError, match="is for models of type 'xf_bert', not 'xf_gpt2'"):
        load_adapter(make("gpt2", "ForCausalLM"), tmp_path, head=False)
    assert adapter_names(wide) == []


def test_the_command(tmp_path, capsys):
    """Fusions, and networks beside the layers: trained, saved alone, evaluated on their base."""
    from tests.finetuning.task_data import classification, command, finetune, pretrained

    data = classification(tmp_path, count=32)
    options = {"model": pretrained(tmp_path / "bert"), "max_steps": 2}
    for name in ("a", "b"):
        finetune("text-classification", data, tmp_path / name, peft="pfeiffer", **options)
    both = f"{tmp_path / 'a'},{tmp_path / 'b'}"
    fusion = ["--peft", "fusion", "--peft.adapters", both]
    summary = finetune("text-classification", data, tmp_path / "run", *fusion, **options)
    said = capsys.readouterr().err
    assert "load_adapter(model" in said and summary["trained_parameters"] < summary["parameters"]
    assert hf_xformers.cli.main(["evaluate", "--model", str(tmp_path / "run"), "--json", "--no_progress"]) == 0
    assert f'"accuracy": {summary["eval_accuracy"]}' in capsys.readouterr().out
    small = ["--peft", "k_adapter", "--peft.adapter_hidden", "8"]
    beside = finetune("text-classification", data, tmp_path / "beside", *small, **options)
    assert hf_xformers.cli.main(["evaluate", "--model", str(tmp_path / "beside"), "--json", "--no_progress"]) == 0
    assert f'"loss": {beside["eval_loss"]:.4f}'[:-1] in capsys.readouterr().out
    argv = command("text-classification", data, tmp_path / "no", **options, peft="fusion")
    for extra in ([], ["--peft.adapters", str(tmp_path / "a")]):
        assert hf_xformers.cli.main(["finetune", *argv, *extra]) == 2
        assert "fewer than two" in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "no").exists()
