import copy
import json

import pytest
import torch
from torch import nn

from hf_xformers.adapters import (
    AdapterConfig,
    activate,
    active_adapter,
    adapter_names,
    add_adapter,
    load_adapter,
    remove_adapter,
    save_adapter,
)
from hf_xformers.variants import config_class, family
from tests.helpers import aligned

WIDTH, LAYERS = 16, 2
IDS = torch.arange(5, 23).reshape(2, 9)


def make(variant="bert", head="ForSequenceClassification", seed=0, **fields):
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": LAYERS}
    config = config_class(variant)(**sizes, vocab_size=60, max_position_embeddings=32, num_labels=3, **fields)
    return family(variant)[head](config).eval()


def logits(model):
    with torch.no_grad():
        given = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        return model(input_ids=IDS, **given).logits


def shake(model, seed=1, amount=0.3):
    """Gives every trainable parameter a random push, in place of training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * amount)


def silence(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_adapters." in name and ".up." in name:
                parameter.zero_()


@pytest.mark.parametrize("kind", ["houlsby", "pfeiffer"])
@pytest.mark.parametrize(
    "variant, head", [("bert", "ForSequenceClassification"), ("gpt2", "ForCausalLM"), ("t5", "ForSeq2SeqLM")]
)
def test_an_adapter_that_adds_nothing_is_the_base(kind, variant, head):
    model = make(variant, head)
    before = logits(model)
    add_adapter(model, "task", kind)
    silence(model)
    if kind == "pfeiffer" and variant == "bert":  # the norm runs twice on the same sum
        torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert torch.equal(logits(model), before)


def test_houlsby_by_hand():
    """LN(x + a(f(x))) after both sublayers, written out for one layer."""
    model = make(hidden_dropout_prob=0.0)
    add_adapter(model, "task", "houlsby", bottleneck=4, init_scale=0.5)
    layer = model.model.trunk.layers[0]
    seen = {}
    layer.register_forward_hook(lambda module, args, kwargs, out: seen.update(x=args[0], y=out[0]), with_kwargs=True)
    functions = {}
    for name in ("attention", "feedforward"):
        getattr(layer, name).register_forward_hook(lambda m, a, out, name=name: functions.update({name: out.output}))
    logits(model)
    x = seen["x"]
    for name in ("attention", "feedforward"):
        frame = getattr(layer, f"{name}_residual")
        adapter, f = frame.sublayer_adapters["task"], functions[name]
        inner = nn.functional.gelu(f @ adapter.down.weight.T + adapter.down.bias)
        a = f + inner @ adapter.up.weight.T + adapter.up.bias
        x = nn.functional.layer_norm(x + a, (WIDTH,), frame.norm.weight, frame.norm.bias, frame.norm.eps)
    torch.testing.assert_close(seen["y"], x, rtol=1e-5, atol=1e-5)


def test_pfeiffer_by_hand():
    """LN(s + act(LN(s) W_d) W_u) with s = x + f(x) after the feed-forward alone."""
    model = make(hidden_dropout_prob=0.0)
    add_adapter(model, "task", "pfeiffer", bottleneck=4, init_scale=0.5)
    layer = model.model.trunk.layers[0]
    frame = layer.feedforward_residual
    assert not len(layer.attention_residual.sublayer_adapters) and not len(layer.attention_residual.norm_adapters)
    seen = {}
    layer.feedforward.register_forward_hook(lambda m, args, out: seen.update(x=args[0], f=out.output))
    layer.register_forward_hook(lambda module, args, kwargs, out: seen.update(y=out[0]), with_kwargs=True)
    logits(model)
    s, adapter = seen["x"] + seen["f"], frame.norm_adapters["task"]

    def norm(h):
        return nn.functional.layer_norm(h, (WIDTH,), frame.norm.weight, frame.norm.bias, frame.norm.eps)

    inner = torch.relu(norm(s) @ adapter.down.weight.T + adapter.down.bias)
    expected = norm(s + inner @ adapter.up.weight.T + adapter.up.bias)
    torch.testing.assert_close(seen["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind, places", [("houlsby", 2 * LAYERS), ("pfeiffer", LAYERS)])
def test_what_is_trained_and_how_much(kind, places):
    model = make()
    add_adapter(model, "task", kind, bottleneck=4)
    model(input_ids=IDS, labels=torch.tensor([0, 2])).loss.backward()
    with_gradient = {name: p.numel() for name, p in model.named_parameters() if p.grad is not None}
    inside = sum(size for name, size in with_gradient.items() if "_adapters." in name)
    assert inside == places * (2 * WIDTH * 4 + WIDTH + 4)
    others = {name for name in with_gradient if "_adapters." not in name}
    assert {"classifier.weight", "classifier.bias"} <= others
    norms = {name for name in others if "norm" in name}
    assert {name.rpartition(".")[0] for name in others - norms} == {"classifier", "model.pooler.dense"}
    assert bool(norms) == (kind == "houlsby")


def test_a_model_without_a_head_is_frozen():
    model = make(head="Model")
    add_adapter(model, "task", "pfeiffer", bottleneck=4)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "_adapters." not in name} == {"pooler.dense.weight", "pooler.dense.bias"}


def test_switching_restores_each_task_and_the_base(tmp_path):
    model = make()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results = {None: logits(model)}  # "layers": parts of the model have an adapter's name, too
    for seed, (name, kind) in enumerate({"layers": "houlsby", "b": "pfeiffer", "c": "houlsby"}.items()):
        add_adapter(model, name, kind)
        shake(model, seed)
        results[name] = logits(model)
    assert len({tuple(found.flatten().tolist()) for found in results.values()}) == 4
    for name in ("b", None, "layers", "c", "b", None):
        activate(model, name)
        assert active_adapter(model) == name
        assert torch.equal(logits(model), results[name])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert all(p.requires_grad for n, p in model.named_parameters() if "_adapters." not in n)
    save_adapter(model, tmp_path / "layers", "layers")
    remove_adapter(model, "layers")
    assert adapter_names(model) == ["b", "c"] and torch.equal(logits(model), results[None])
    activate(model, "b")
    remove_adapter(model, "b")
    assert active_adapter(model) is None and torch.equal(logits(model), results[None])
    other = make()
    assert load_adapter(other, tmp_path / "layers") == "layers" and torch.equal(
        logits(aligned(other)), results["layers"]
    )
    assert load_adapter(other, tmp_path / "layers", "again") == "again" and torch.equal(
        logits(aligned(other)), results["layers"]
    )
    saved = {path.name: path.stat().st_size for path in (tmp_path / "layers").iterdir()}
    assert set(saved) == {"bottleneck.safetensors", "bottleneck_config.json"}


def test_a_copy_has_adapters_of_its_own():
    model = make()
    add_adapter(model, "task", "houlsby", init_scale=0.5)
    other, before = copy.deepcopy(model), logits(model)
    shake(other)
    assert torch.equal(logits(model), before) and not torch.equal(logits(other), before)


@pytest.mark.parametrize("change", [
    {"adapter": {"kind": "houlsby", "scale": 2}}, {"adapter": {"kind": "new"}}, {"adapter": {"bottleneck": "4"}},
    {"adapter": None}, {"model_type": None}, {"name": 3}, {"id2label": None}, {"members": [1]},
])  # fmt: skip
def test_a_config_of_another_version(change, tmp_path):
    model = make()
    add_adapter(model, "task")
    save_adapter(model, tmp_path)
    about = json.loads((tmp_path / "bottleneck_config.json").read_text())
    (tmp_path / "bottleneck_config.json").write_text(json.dumps({**about, **change}))
    other = make()
    with pytest.raises(ValueError, match="is of a newer version, or damaged .*; update this package"):
        load_adapter(other, tmp_path)
    assert adapter_names(other) == []
    (tmp_path / "bottleneck_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no bottleneck adapter that can be read"):
        load_adapter(other, tmp_path)


def test_integers_of_a_quantized_base_do_not_learn():
    model = make()
    model.codes = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    add_adapter(model, "task")
    activate(model, None)
    assert not model.codes.requires_grad and model.classifier.weight.requires_grad


def test_what_is_refused(tmp_path):
    model = make()
    add_adapter(model, "task", "pfeiffer")
    before = logits(model)
    for call, words in (
        (lambda: add_adapter(model, "task"), "has an adapter 'task' already"),
        (lambda: add_adapter(model, "a.b"), "'a.b' cannot be one"),
        (lambda: add_adapter(model, "train"), "'train' cannot be one"),
        (lambda: activate(model, "other"), "no adapter 'other'; its adapters are: task"),
        (lambda: remove_adapter(model, "other"), "no adapter 'other'"),
        (lambda: save_adapter(model, tmp_path, "other"), "no adapter 'other' to save"),
        (lambda: load_adapter(model, tmp_path), "holds no bottleneck adapter"),
        (lambda: AdapterConfig("housby"), "choose one of houlsby, pfeiffer"),
        (lambda: AdapterConfig(bottleneck=0), "width must be at least 1"),
        (lambda: AdapterConfig(init_scale=0), "`init_scale` of an adapter must be above 0"),
        (lambda: add_adapter(nn.Linear(2, 2), "x"), "Linear has no layers of this package"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    save_adapter(model, tmp_path / "task")
    with pytest.raises(ValueError, match="is for XFBertForSequenceClassification, not XFBertForTokenClassification"):
        load_adapter(make(head="ForTokenClassification"), tmp_path / "task")
    other = make()
    other.classifier = nn.Linear(WIDTH, 5)
    with pytest.raises(ValueError, match=r"does not fit the model at 'classifier.bias'; .* num_labels=3"):
        load_adapter(other, tmp_path / "task")
    assert adapter_names(other) == []
    whole = (tmp_path / "task" / "bottleneck.safetensors").read_bytes()
    (tmp_path / "task" / "bottleneck.safetensors").write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="can be read"):
        load_adapter(make(), tmp_path / "task")
    assert torch.equal(logits(model), before)
