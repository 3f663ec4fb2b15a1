"""Early exit: against a layer-by-layer computation of each text alone, written from the papers' rules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSequenceClassification

from hf_xformers import XFormerConfig, XFormerForSequenceClassification, XFormerModel
from hf_xformers.stacks.entropy_exit import entropy
from tests.helpers import NO_DROPOUT, close, close_gradients, make_strong, pad, tokens

LAYERS, LABELS = 5, 3
SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "add_pooler": True,
    **NO_DROPOUT,
}
RULES = ("entropy_exit", "patience_exit")


def build(type, labels=LABELS, cls=XFormerForSequenceClassification, spread=1.0, **more):
    """A float64 model whose classifiers differ, so that texts leave at different layers."""
    fields = {key: more.pop(key) for key in list(more) if key in XFormerConfig.__dataclass_fields__}
    names = {"problem_type": more.pop("problem_type")} if "problem_type" in more else {}
    torch.manual_seed(0)
    config = XFormerConfig(**{**SIZES, **fields, **names, "num_labels": labels, "stack": {"type": type, **more}})
    net = make_strong(cls(config).double().eval())
    for module in net.modules():
        if isinstance(module, nn.Linear) and module.out_features == labels:
            nn.init.normal_(module.weight, std=spread)
    return net


def all_logits(net, **inputs):
    """Every classifier's logits, from the recorded states of a model that runs all its layers: L times [B, C]."""
    with torch.no_grad():
        states = net.model(**inputs, output_hidden_states=True).hidden_states[1:]
        mask = inputs.get("attention_mask")
        first = torch.zeros(len(states[0]), dtype=torch.long) if mask is None else mask.argmax(-1)
        norm = net.model.trunk.final_norm
        found = []
        for index, state in enumerate(states):
            last = index == len(states) - 1  # recorded after the final norm
            state = state if norm is None or last else norm(state)
            vector = state[torch.arange(len(first)), first]
            if hasattr(net.exits, "ramps") and not last:
                ramp = net.exits.ramps[index]
                found.append(ramp.classifier(torch.tanh(ramp.pooler.dense(vector))))
            else:
                vector = torch.tanh(net.model.pooler.dense(vector))
                found.append((net.classifier if last else net.exits.classifiers[index])(vector))
        return found


def by_entropy(logits, threshold):
    """The layer that one text leaves after, from its logits at every layer."""
    for layer, row in enumerate(logits[:-1], start=1):
        if torch.distributions.Categorical(logits=row).entropy() < threshold:
            return layer
    return len(logits)


def by_patience(logits, patience, agree):
    count = 0
    for layer in range(1, len(logits)):
        if layer > 1:
            count = count + 1 if agree(logits[layer - 1], logits[layer - 2]) else 0
        if patience and count == patience:
            return layer
    return len(logits)


def batch():
    rows = [tokens(9 if index % 3 else 5, seed=index) for index in range(24)]
    return rows, pad(rows, 11, "left", seed=7)


SETTINGS = {
    "entropy_exit": ({"threshold": 0.5}, lambda logits: by_entropy(logits, 0.5)),
    "patience_exit": ({"patience": 1}, lambda logits: by_patience(logits, 1, lambda a, b: a.argmax() == b.argmax())),
}


@pytest.mark.parametrize("mix", [{}, {"residual": "pre_ln", "position": "rotary"}], ids=["bert", "pre_ln_rotary"])
@pytest.mark.parametrize("type", RULES)
def test_exits(type, mix):
    """Logits and layers of a padded batch equal the rule applied to each text alone; recording, tracing and running
    alone give the same."""
    fields, rule = SETTINGS[type]
    net = build(type, **fields, **mix)
    rows, (ids, mask) = batch()
    every = torch.stack(all_logits(net, input_ids=ids, attention_mask=mask))
    expected = [rule(every[:, index]) for index in range(len(rows))]
    assert len(set(expected)) >= 3 and LAYERS in expected  # the test sees several layers
    with torch.no_grad():
        output = net(input_ids=ids, attention_mask=mask)
        assert output.exit_layers.tolist() == expected
        for index, layer in enumerate(expected):
            close(output.logits[index], every[layer - 1, index])
        recorded = net(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        assert len(recorded.hidden_states) == LAYERS + 1
        assert torch.equal(recorded.exit_layers, output.exit_layers)
        close(recorded.logits, output.logits)
        for index, row in enumerate(rows):
            alone = net(input_ids=row[None])
            assert alone.exit_layers.item() == expected[index]
            close(alone.logits[0], output.logits[index])


@pytest.mark.parametrize("type", RULES)
def test_fewer_layers_run(type):
    """Work is saved: a layer sees only the rows that still run, and none sees an empty batch."""
    net = build(type, **SETTINGS[type][0])
    _, (ids, mask) = batch()
    sizes = []
    for layer in net.model.trunk.layers:
        layer.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[0]))
    with torch.no_grad():
        exits = net(input_ids=ids, attention_mask=mask).exit_layers
    assert sizes == [int((exits > layer).sum()) for layer in range(LAYERS) if (exits > layer).any()]
    assert len(set(sizes)) > 2
    sizes.clear()
    first = exits == exits.min()
    with torch.no_grad():
        net(input_ids=ids[first], attention_mask=mask[first])
    assert sizes == [int(first.sum())] * int(exits.min())


@pytest.mark.parametrize("type", RULES)
def test_traced(type):
    """A graph runs all layers and gives the same answer."""
    net = build(type, **SETTINGS[type][0], num_hidden_layers=3)
    _, (ids, mask) = batch()
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        expected, output = net(input_ids=ids, attention_mask=mask), compiled(input_ids=ids, attention_mask=mask)
    torch._dynamo.reset()
    close(output.logits, expected.logits)
    assert torch.equal(output.exit_layers, expected.exit_layers) and len(expected.exit_layers.unique()) > 1


def test_threshold_limits():
    """-1 is the whole model; more than log C is the first layer; the exit is never later for a larger threshold; a
    list has one threshold for each layer."""
    net = build("entropy_exit")
    _, (ids, mask) = batch()
    given = {"input_ids": ids, "attention_mask": mask}
    every = all_logits(net, **given)
    before = torch.full((len(ids),), LAYERS)
    with torch.no_grad():
        for threshold in (-1, 0.1, 0.3, 0.6, 0.9, 1.2):
            net.config.stack.threshold = threshold
            output = net(**given)
            assert (output.exit_layers <= before).all()
            before = output.exit_layers
            if threshold == -1:
                close(output.logits, every[-1])
        assert (before == 1).all()
        close(output.logits, every[0])
        net.config.stack.threshold = (-1, 1.2, -1, -1)
        output = net(**given)
        assert (output.exit_layers == 2).all()
        close(output.logits, every[1])


def test_entropy():
    logits = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    close(entropy(logits), torch.distributions.Categorical(logits=logits).entropy())
    large = torch.tensor([[2000.0, 0.0, -2000.0], [1000.0, 1000.0, -1000.0]])  # exp() of these overflows
    close(entropy(large), torch.tensor([0.0, 2.0]).log1p() * torch.tensor([0.0, 1.0]) * 0.6309297535714575, 1e-6)


def test_shared_layers():
    """One layer at every depth equals a model whose layers are copies of it."""
    net = build("patience_exit", patience=2, share_layers=True)
    other = build("patience_exit", patience=2)
    state = {
        key.replace("layers.0.", f"layers.{index}."): value
        for key, value in net.state_dict().items()
        for index in range(LAYERS)
    }
    other.load_state_dict(state)
    _, (ids, mask) = batch()
    with torch.no_grad():
        one, many = net(input_ids=ids, attention_mask=mask), other(input_ids=ids, attention_mask=mask)
    close(one.logits, many.logits)
    assert torch.equal(one.exit_layers, many.exit_layers) and len(one.exit_layers.unique()) > 1


@pytest.mark.parametrize(
    ("kind", "labels", "agree"),
    [
        ("regression", 1, lambda a, b: (a - b).abs().item() < 2.5),
        ("multi_label_classification", 2, lambda a, b: ((a > 0) == (b > 0)).all()),
    ],
)
def test_other_answers(kind, labels, agree):
    """Numbers agree within tau, label sets when all labels do; entropy is refused for both."""
    net = build("patience_exit", labels, patience=1, regression_threshold=2.5, problem_type=kind)
    rows, (ids, mask) = batch()
    every = torch.stack(all_logits(net, input_ids=ids, attention_mask=mask))
    expected = [by_patience(every[:, index], 1, agree) for index in range(len(rows))]
    assert len(set(expected)) >= 3
    with torch.no_grad():
        assert net(input_ids=ids, attention_mask=mask).exit_layers.tolist() == expected
        with pytest.raises(ValueError, match="Entropy is defined for one choice among several classes"):
            build("entropy_exit", labels, threshold=0.5, problem_type=kind)(input_ids=ids)


# ------------------------------------------------------------------------------------------------ training


def losses(net, ids, labels):
    """Cross-entropy of every classifier, by the layers' modules called one after the other."""
    base = net.model(input_ids=ids, output_hidden_states=True)
    found = []
    for index, state in enumerate(base.hidden_states[1:]):
        last = index == LAYERS - 1
        if hasattr(net.exits, "ramps") and not last:
            logits = net.exits.ramps[index](state, None)
        else:
            logits = (net.classifier if last else net.exits.classifiers[index])(net.model.pooler(state))
        found.append(F.cross_entropy(logits, labels))
    return found


def grads(loss, net):
    found = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(net.named_parameters(), found)}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_patience_training(checkpointing):
    """sum_l l * CE_l / sum_l l, and its gradients."""
    net, ids, labels = build("patience_exit"), tokens(6, 7), torch.tensor([0, 1, 2, 0, 1, 2])
    found = losses(net, ids, labels)
    expected = sum(weight * loss for weight, loss in enumerate(found, start=1)) / sum(range(1, LAYERS + 1))
    wanted = grads(expected, net)
    assert all(
        value.abs().sum() > 0 for name, value in wanted.items() if "k_proj.bias" not in name and "0" not in name
    )
    net.train()
    if checkpointing:
        net.gradient_checkpointing_enable()
    output = net(input_ids=ids, labels=labels)
    assert output.exit_layers is None
    close(output.loss, expected.detach())
    close_gradients(grads(output.loss, net), wanted)


def test_two_stages():
    """Stage one is BERT's loss; stage two is the sum of the ramps' losses, and reaches nothing but ramps."""
    net, ids, labels = build("entropy_exit"), tokens(6, 7), torch.tensor([0, 1, 2, 0, 1, 2])
    found = losses(net, ids, labels)
    net.train()
    loss = net(input_ids=ids, labels=labels).loss
    close(loss, found[-1].detach())
    loss.backward()
    learned = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in net.named_parameters() if not name.startswith("exits.")}
    net.zero_grad(set_to_none=True)

    net.exits.begin_ramps(net)
    for ramp in net.exits.ramps:
        assert torch.equal(ramp.pooler.dense.weight, net.model.pooler.dense.weight)
    found = losses(copy.deepcopy(net).eval(), ids, labels)
    loss = net(input_ids=ids, labels=labels).loss
    close(loss, sum(found[:-1]).detach())
    loss.backward()
    learned = {name for name, parameter in net.named_parameters() if parameter.grad is not None}
    assert learned == {name for name, _ in net.named_parameters() if name.startswith("exits.")}
    assert learned == {name for name, parameter in net.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("type", ["deebert", "pabee"])
def test_saving(type, tmp_path):
    """Ramps, thresholds and the stage of training come back."""
    from hf_xformers.variants import config_class, family

    fields = {key: value for key, value in SIZES.items() if key != "add_pooler"}
    stack = {"deebert": {"type": "entropy_exit", "threshold": 0.5}, "pabee": {"type": "patience_exit", "patience": 2}}
    config = config_class(type)(**fields, num_labels=LABELS, stack=stack[type])
    net = make_strong(family(type)["ForSequenceClassification"](config).eval(), amount=0.5)
    if type == "deebert":
        net.exits.begin_ramps(net)
    net.save_pretrained(tmp_path)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()) and loaded.config.stack == net.config.stack
    _, (ids, mask) = batch()
    with torch.no_grad():
        one, two = net(input_ids=ids, attention_mask=mask), loaded(input_ids=ids, attention_mask=mask)
    assert torch.equal(one.logits, two.logits) and torch.equal(one.exit_layers, two.exit_layers)
    loaded.train()(input_ids=ids, attention_mask=mask, labels=torch.zeros(len(ids), dtype=torch.long)).loss.backward()
    learned = {name.split(".")[0] for name, p in loaded.named_parameters() if p.grad is not None}
    assert learned == ({"exits"} if type == "deebert" else {"model", "classifier", "exits"})


def test_refusals():
    with pytest.raises(ValueError, match="not defined for a decoder"):
        XFormerModel(XFormerConfig(**SIZES, stack="entropy_exit", is_decoder=True))
    with pytest.raises(ValueError, match="single layers cannot differ"):
        config = XFormerConfig(
            **SIZES,
            stack={"type": "patience_exit", "share_layers": True},
            per_layer_config={1: {"feedforward": "relu"}},
        )
        XFormerModel(config)
