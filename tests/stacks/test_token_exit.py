"""Tokens that halt: against a layer-by-layer computation of each text alone."""

import pytest
import torch
from torch import nn

from hf_xformers import XFormerConfig, XFormerForTokenClassification
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

LAYERS, LABELS = 4, 3
SIZES = {
    **{"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2},
    **{"intermediate_size": 32, "num_labels": LABELS, **NO_DROPOUT},
}


def build(residual="post_ln", **stack):
    torch.manual_seed(0)
    config = XFormerConfig(**SIZES, residual=residual, stack={"type": "token_exit", **stack})
    net = make_strong(XFormerForTokenClassification(config).double().eval(), amount=0.2)
    for module in net.modules():
        if isinstance(module, nn.Linear) and module.out_features == LABELS:
            nn.init.normal_(module.weight, std=1.0)
    return net


def by_hand(net, ids, threshold, window, level="token"):
    """(logits, layers) of one text [T]: every layer on all tokens, halted states put back."""
    trunk, exits = net.model.trunk, net.exits
    states = trunk.embedding(trunk.embedding.lookup(ids[None]), None, torch.arange(len(ids))[None], trunk.position)
    context = trunk.make_context(states)
    layers = [0] * len(ids)
    logits = torch.zeros(len(ids), LABELS, dtype=torch.float64)
    for number, layer in enumerate(trunk.layers, start=1):
        layer.prepare(context, None)
        new = layer(states, None, context=context, step=number - 1)[0]
        new = torch.stack([states[0, i] if at else new[0, i] for i, at in enumerate(layers)])[None]
        states = new
        read = states if trunk.final_norm is None else trunk.final_norm(states)
        answers = (net.classifier if number == LAYERS else exits.classifiers[number - 1])(read)[0]
        unsure = [
            torch.distributions.Categorical(logits=row).entropy().item() / torch.tensor(float(LABELS)).log().item()
            for row in answers
        ]
        unsure = [0.0 if at else u for u, at in zip(unsure, layers)]
        for i in [i for i, at in enumerate(layers) if not at]:
            near = unsure if level == "sentence" else unsure[max(0, i - window) : i + window + 1]
            if number == LAYERS or max(near) < threshold:
                layers[i], logits[i] = number, answers[i]
    return logits, layers


@pytest.mark.parametrize("residual", ["post_ln", "pre_ln"])
@pytest.mark.parametrize(("level", "window"), [("token", 0), ("token", 1), ("sentence", 1)])
def test_halting(level, window, residual):
    threshold = 0.7
    net = build(residual, exit_threshold=threshold, exit_window=window, exit_level=level)
    rows = [tokens(length, seed=seed) for seed, length in enumerate((7, 4, 1, 6, 2, 1, 3))]
    with torch.no_grad():
        expected = [by_hand(net, row, threshold, window, level) for row in rows]
        assert len({layer for _, layers in expected for layer in layers}) >= 2
        for side in ("left", "right"):
            ids, mask = pad(rows, 9, side, seed=5)
            output = net(ids, attention_mask=mask)
            recorded = net(ids, attention_mask=mask, output_hidden_states=True)
            for number, (logits, layers) in enumerate(expected):
                real = mask[number].bool()
                assert output.exit_layers[number][real].tolist() == layers
                close(output.logits[number][real], logits)
                close(recorded.logits[number][real], logits)


def test_fewer_layers_and_tokens_run():
    net, ids = build(exit_threshold=1.01), tokens(3, 6)
    calls, mapped = [], []
    for number, layer in enumerate(net.model.trunk.layers):
        layer.register_forward_hook(lambda *_, n=number: calls.append(n))
        layer.feedforward.register_forward_pre_hook(lambda _, given: mapped.append(given[0].shape[:2].numel()))
    net(ids)
    assert calls == [0]
    net.config.stack.exit_threshold, net.config.stack.exit_window = 0.7, 0
    calls.clear(), mapped.clear()
    layers = net(ids).exit_layers
    alive = [int((layers > depth).sum()) for depth in range(len(calls))]
    assert mapped == [18, *alive[1:]] and alive[1] < 18


def test_training():
    """sum_l l CE_l / sum_l l, and with `self_sampling` of the tokens that reach a classifier."""
    ids, labels = tokens(3, 6), torch.randint(0, LABELS, (3, 6), generator=torch.Generator().manual_seed(0))
    labels[0, 2] = -100
    net = build().train()
    states = net.model(ids, output_hidden_states=True).hidden_states[1:]
    heads = [*net.exits.classifiers, net.classifier]
    losses = [nn.functional.cross_entropy(head(x).transpose(1, 2), labels) for head, x in zip(heads, states)]
    expected = sum(depth * loss for depth, loss in enumerate(losses, start=1)) / 10
    loss = net(ids, labels=labels).loss
    close(loss, expected)
    loss.backward()
    assert all(parameter.grad is not None for parameter in net.parameters())

    sampled = build(training_stage="self_sampling", exit_threshold=0.7, exit_window=0)
    layers = sampled.eval()(ids).exit_layers
    assert 1 < layers.unique().numel()
    total = 0.0
    for depth in range(1, LAYERS + 1):  # classifier `depth` on the tokens that reach it, of texts that halt below it
        answers = classifier_logits(sampled, ids, depth)
        kept = labels.masked_fill(layers < depth, -100)
        count = (kept != -100).sum().clamp(min=1)
        total += depth * nn.functional.cross_entropy(answers.transpose(1, 2), kept, reduction="sum") / count
    close(sampled.train()(ids, labels=labels).loss, total / 10)
    half = sampled(ids, labels=labels, num_items_in_batch=2 * (labels != -100).sum()).loss
    close(2 * half, total / 10)


def classifier_logits(net, ids, depth):
    """What the classifier after layer `depth` says of texts whose tokens halt below it, [B, T, C]."""
    last = depth == LAYERS
    hooked = []
    module = net.classifier if last else net.exits.classifiers[depth - 1]
    handle = module.register_forward_hook(lambda _, __, output: hooked.append(output.detach()))
    with torch.no_grad():
        net.eval()(ids, output_hidden_states=True)  # all rows run through all layers
    handle.remove()
    return hooked[0]
