"""Networks beside a frozen encoder: the sum that is left without their small encoders, padding, gradients, several
to a model, saving, refusals."""

import copy

import pytest
import torch

from hf_xformers.adapters import (
    KAdapterConfig,
    activate,
    adapter_names,
    add_adapter,
    load_adapter,
    remove_adapter,
    save_adapter,
)
from tests.adapters.test_bottleneck import IDS, WIDTH, logits, make, shake


def small(**fields):
    return {"adapter_hidden": 8, "adapter_layers": 1, **fields}


def tower_states(model, ids, mask=None):
    with torch.no_grad():
        out = model.model.trunk(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return list(out.hidden_states)


@pytest.mark.parametrize("variant", ["bert", "universal_transformer", "bigbird"])
def test_a_fresh_one_changes_nothing(variant):
    model = make(variant)
    before = logits(model)
    add_adapter(model, "facts", "k_adapter", **small())
    torch.testing.assert_close(logits(model), before, rtol=1e-6, atol=1e-6)
    shake(model)
    assert not torch.allclose(logits(model), before)
    activate(model, None)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("layers, silent", [([0, 1, 2], "downs"), ([1], "ups"), ([0, 2], "ups"), (None, "downs")])
def test_without_its_encoders_it_is_a_sum_of_states(layers, silent):
    """With Up = 0 (or Down = 0 and no biases): a_last = the sum of the states that are read."""
    model = make()
    states = tower_states(model, IDS)
    add_adapter(model, "facts", "k_adapter", **small(layers=layers))
    adapter = model.model.trunk.side_adapters["facts"]
    with torch.no_grad():
        for linear in (*adapter.ups, *(adapter.downs if silent == "downs" else ())):
            linear.weight.zero_()
            linear.bias.zero_()
        adapter.combine.weight.copy_(torch.cat([torch.zeros(WIDTH, WIDTH), torch.eye(WIDTH)], 1))
        found = model.model.trunk(input_ids=IDS).last_hidden_state
    wanted = sum(states[place] for place in (layers or [0, 1, 2]))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_by_hand():
    """One state, one small layer of one head, token by token: LN(y + FFN(y)) with y = LN(d + attention(d))."""
    model = make(hidden_dropout_prob=0.0)
    add_adapter(model, "facts", "k_adapter", **small(layers=[1], adapter_heads=1))
    shake(model, amount=0.2)
    adapter = model.model.trunk.side_adapters["facts"].eval()
    layer = adapter.encoders[0][0]
    h = tower_states_without(model)[1][0]
    d = torch.stack([adapter.downs[0].weight @ x + adapter.downs[0].bias for x in h])
    parts = zip(layer.self_attn.in_proj_weight.split(8), layer.self_attn.in_proj_bias.split(8))
    q, k, v = (d @ weight.T + bias for weight, bias in parts)
    out = []
    for i in range(len(h)):
        chances = torch.stack([q[i] @ k[j] / 8**0.5 for j in range(len(h))]).softmax(0)
        mixed = sum(p * v[j] for j, p in enumerate(chances))
        y = layer.norm1(d[i] + layer.self_attn.out_proj(mixed))
        y = layer.norm2(y + layer.linear2(torch.nn.functional.gelu(layer.linear1(y))))
        out.append(h[i] + adapter.ups[0].weight @ y + adapter.ups[0].bias)
    with torch.no_grad():
        found = adapter.knowledge(tower_states_without(model), None)[0]
    torch.testing.assert_close(found, torch.stack(out), rtol=1e-4, atol=1e-5)


def tower_states_without(model):
    """The states of the base: what an adapter that is on makes of them comes after."""
    return tower_states(model, IDS[:1])


def test_padding_is_masked():
    """A row reads the same beside a longer one, on either side; a row of padding alone stays finite."""
    model = make()
    add_adapter(model, "facts", "k_adapter", **small())
    shake(model)
    short = IDS[:1, :5]
    with torch.no_grad():
        alone = model.model.trunk(input_ids=short).last_hidden_state
        for padded, mask in (((0, 4), [1] * 5 + [0] * 4), ((4, 0), [0] * 4 + [1] * 5)):
            row = torch.nn.functional.pad(short, padded, value=7)
            ids = torch.cat([row, IDS[1:], row])
            masks = torch.tensor([mask, [1] * 9, [0] * 9])
            found = model.model.trunk(input_ids=ids, attention_mask=masks).last_hidden_state
            torch.testing.assert_close(found[:1][:, masks[0].bool()], alone, rtol=1e-4, atol=1e-5)
            assert found.isfinite().all()


def test_what_is_trained():
    model = make()
    add_adapter(model, "facts", "k_adapter", **small(layers=[0, 2]))
    shake(model)
    model.train()(input_ids=IDS, labels=torch.tensor([0, 2])).loss.backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    inside = {name for name in with_gradient if ".side_adapters.facts." in name}
    assert {name.rpartition(".")[0] for name in with_gradient - inside} == {"classifier", "model.pooler.dense"}
    assert inside == {name for name, _ in model.named_parameters() if "side_adapters" in name}
    d, m = WIDTH, 8
    layer = 4 * (m * m + m) + (m * 4 * m + 4 * m) + (4 * m * m + m) + 4 * m
    size = sum(p.numel() for name, p in model.named_parameters() if name in inside)
    assert size == 2 * ((d * m + m) + layer + (m * d + d)) + 2 * d * d + d


def test_several_to_a_model_and_alone(tmp_path):
    """Two that are trained apart do not change each other; each is saved and loaded alone, beside a bottleneck."""
    model = make()
    results = {None: logits(model)}
    for seed, (name, kind, fields) in enumerate(
        [("ups", "k_adapter", small()), ("b", "houlsby", {}), ("c", "k_adapter", small(layers=[1]))]
    ):
        add_adapter(model, name, kind, **fields)
        shake(model, seed)
        results[name] = logits(model)
    other = copy.deepcopy(model)
    for name in ("ups", "b", None, "c", "ups"):
        activate(model, name)
        assert torch.equal(logits(model), results[name])
    activate(other, "ups")
    shake(other)
    assert not torch.equal(logits(other), results["ups"]) and torch.equal(logits(model), results["ups"])
    save_adapter(model, tmp_path / "facts", "ups")
    fresh = make()
    assert load_adapter(fresh, tmp_path / "facts", "again") == "again"
    assert torch.equal(logits(fresh.eval()), results["ups"])
    remove_adapter(fresh, "again")
    assert adapter_names(fresh) == [] and torch.equal(logits(fresh), results[None])


def test_what_is_refused(tmp_path):
    model = make()
    for call, words in (
        (
            lambda: add_adapter(model, "a", "k_adapter", layers=[0, 3]),
            r"read the states \[0, 3\], and the model has 0",
        ),
        (lambda: add_adapter(model, "a", "k_adapter", adapter_hidden=9), "9 is not divided by its 2 heads"),
        (lambda: KAdapterConfig(layers=[2, 1]), "states in ascending order"),
        (lambda: KAdapterConfig(adapter_layers=0), "`adapter_layers` of a K-Adapter must be at least 1"),
        (lambda: add_adapter(make("gpt2", "ForCausalLM"), "a", "k_adapter"), "reads whole texts next to an encoder"),
        (lambda: add_adapter(make("t5", "ForSeq2SeqLM"), "a", "k_adapter"), "has more than one tower"),
        (lambda: add_adapter(make("funnel_transformer"), "a", "k_adapter"), "differ in length or width"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert adapter_names(model) == []
    add_adapter(model, "a", "k_adapter", **small())
    save_adapter(model, tmp_path)
    from hf_xformers.variants import config_class, family

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    wide = family("bert")["ForSequenceClassification"](config_class("bert")(**sizes, vocab_size=60, num_labels=3))
    with pytest.raises(ValueError, match="is for a model of width 16, and this one's is 32; load its base"):
        load_adapter(wide, tmp_path)
