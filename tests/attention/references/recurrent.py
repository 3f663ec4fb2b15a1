"""Mechanisms whose state decays: token by token, head by head, with the numbers of each token written out."""

import math

import torch
from transformers import initialization

from tests.attention.references.table import DECODER, GROUPED, rows


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return torch.log1p(torch.exp(x))


def convolved(layer, parts):
    """A window of the last inputs for each token, zeros before the text."""
    if layer.short_conv is None:
        return parts
    order = ["qkv".index(name) for name in layer.conv_order]
    joined = torch.cat([parts[which] for which in order], -1)
    weight, bias, found = layer.short_conv.weight, layer.short_conv.bias, torch.zeros_like(joined)
    taps = weight.shape[1]
    for t in range(joined.shape[0]):
        for j in range(taps):
            if t - taps + 1 + j >= 0:
                found[t] += weight[:, j] * joined[t - taps + 1 + j]
    found = silu(found if bias is None else found + bias)
    split = found.split([parts[which].shape[-1] for which in order], -1)
    return [split[order.index(which)] for which in range(3)]


def tensors(layer, x, factors=(1.0, 1.0, 1.0)):
    """q, k [G, n, K] and v [H, n, dv] of one text [1, n, D], one of each for each of H heads."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    parts = convolved(layer, [factor * project(x[0]) for project, factor in zip(projections, factors, strict=True)])
    widths, heads = (layer.key_width, layer.key_width, layer.value_width), layer.num_heads
    found = []
    for part, width in zip(parts, widths, strict=True):
        own = [part[:, i : i + width] for i in range(0, part.shape[1], width)]
        found.append(torch.stack([own[h * len(own) // heads] for h in range(heads)]))
    return found


def recurrence(q, k, v, decay, beta=None):
    """Matrices of each step written out; decay [H, n] or [H, n, K]. What is read of each value is its weight."""
    heads, n, width = k.shape
    weights = torch.zeros(1, heads, n, n, dtype=torch.float64)
    for h in range(heads):
        state = torch.zeros(width, n, dtype=torch.float64)
        for t in range(n):
            state = torch.diag(decay[h, t].expand(width)) @ state
            strength = 1.0 if beta is None else beta[h, t]
            if beta is not None:
                state = (torch.eye(width).double() - strength * torch.outer(k[h, t], k[h, t])) @ state
            state[:, t] += strength * k[h, t]
            weights[0, h, t] = q[h, t] @ state
    return weights @ v, weights


def normed(layer, x, groups):
    """x [n, W] in equal parts over their root mean squares."""
    parts = x.view(len(x), groups, -1)
    return (parts / (parts.square().mean(-1, keepdim=True) + layer.output_norm.eps).sqrt()).view(len(x), -1)


def joined(found):
    return found[0].transpose(0, 1).flatten(1)


def per_head(layer):
    return layer.output_norm.weight.repeat(layer.num_heads)


def both_ways(equation):
    """In an encoder the mean of a text's result and that of the text from its end."""

    def found(layer, x, memory=None, causal=True):
        ahead = equation(layer, x)
        if causal:
            return ahead
        back = equation(layer, x.flip(1))
        return (ahead[0] + back[0].flip(1)) / 2, (ahead[1] + back[1].flip(2, 3)) / 2

    return found


def delta_parts(layer, x):
    q, k, v = tensors(layer, x)
    q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    beta = sigmoid(layer.beta_proj(x[0])).T * (2 if layer.spec.negative else 1)
    return q * layer.key_width**-0.5, k, v, beta


@both_ways
def gated_delta_net(layer, x, memory=None, causal=True):
    q, k, v, beta = delta_parts(layer, x)
    rate = torch.exp(layer.decay.A_log) * softplus(layer.decay_proj(x[0]) + layer.decay.dt_bias)
    found, weights = recurrence(q, k, v, torch.exp(-rate).T, beta)
    out = normed(layer, joined(found), layer.num_heads) * per_head(layer) * silu(layer.gate_proj(x[0]))
    return layer.o_proj(out)[None], weights


@both_ways
def kimi_delta_attention(layer, x, memory=None, causal=True):
    q, k, v, beta = delta_parts(layer, x)
    steps = softplus(layer.decay_up_proj(layer.decay_down_proj(x[0])) + layer.decay.dt_bias)
    steps = steps.view(len(x[0]), layer.num_heads, -1).transpose(0, 1)
    decay = torch.exp(-torch.exp(layer.decay.A_log)[:, None, None] * steps)
    found, weights = recurrence(q, k, v, decay, beta)
    gate = sigmoid(layer.gate_up_proj(layer.gate_down_proj(x[0])))
    return layer.o_proj(normed(layer, joined(found), layer.num_heads) * per_head(layer) * gate)[None], weights


@both_ways
def delta_product(layer, x, memory=None, causal=True):
    """One decay and several corrections for each token, each with the state before it."""
    n, heads, length = layer.spec.num_householder, layer.num_heads, x.shape[1]
    q, k, v = convolved(layer, [project(x[0]) for project in (layer.q_proj, layer.k_proj, layer.v_proj)])

    def head(part, width, h):
        return part.split(width, -1)[h * (part.shape[1] // width) // heads]

    def unit(y):
        return y / (y.square().sum() + 1e-6).sqrt()

    strengths = sigmoid(layer.beta_proj(x[0])) * (2 if layer.spec.negative else 1)
    if layer.spec.type == "gated_delta_net":
        steps = softplus(layer.decay_proj(x[0]) + layer.decay.dt_bias)[..., None]
        gate = silu(layer.gate_proj(x[0]))
    else:
        steps = softplus(layer.decay_up_proj(layer.decay_down_proj(x[0])) + layer.decay.dt_bias)
        steps = steps.view(length, heads, -1)
        gate = sigmoid(layer.gate_up_proj(layer.gate_down_proj(x[0])))
    decay, found = torch.exp(-torch.exp(layer.decay.A_log)[:, None] * steps), []
    weights = torch.zeros(1, heads, length, length, dtype=torch.float64)
    for h in range(heads):
        state = torch.zeros(layer.key_width, length * n, dtype=torch.float64)  # of each value of the text
        values, read = [head(y, layer.value_width, h) for t in range(length) for y in v[t].view(n, 1, -1)], []
        for t in range(length):
            state = state * decay[t, h][:, None]
            for j, (key, beta) in enumerate(zip(k[t].view(n, 1, -1), strengths[t].chunk(n), strict=True)):
                key = unit(head(key, layer.key_width, h)[0])
                state = state - beta[h] * torch.outer(key, key @ state)
                state[:, t * n + j] += beta[h] * key
            read.append(unit(head(q[t : t + 1], layer.key_width, h)[0]) * layer.key_width**-0.5 @ state)
        found.append(torch.stack(read) @ torch.cat(values))
        weights[0, h] = torch.stack(read).view(length, length, n).sum(-1)
    out = normed(layer, joined(torch.stack(found)[None]), heads) * per_head(layer) * gate
    return layer.o_proj(out)[None], weights


@both_ways
def mamba2(layer, x, memory=None, causal=True):
    spec = layer.spec
    gate, of_v, of_b, of_c, of_step = spec.part_scales or [1.0] * 5
    c, b, v = tensors(layer, x, (of_c, of_b, of_v))
    step = softplus(of_step * layer.decay_proj(x[0]) + layer.decay.dt_bias).T.clamp(spec.least_step, spec.most_step)
    decay = torch.exp(-torch.exp(layer.decay.A_log)[:, None] * step)
    found, weights = recurrence(c, b, v * step[..., None], decay)
    out, z = joined(found + layer.skip.D[:, None, None] * v), gate * layer.gate_proj(x[0])
    groups = spec.heads(layer.config)[1]
    if spec.gate_norm == "gate_first":
        out = normed(layer, out * silu(z), groups) * layer.output_norm.weight
    elif spec.gate_norm == "norm_first":
        out = normed(layer, out, groups) * layer.output_norm.weight * silu(z)
    else:
        out = out * silu(z)
    return layer.o_proj(out)[None], weights


@both_ways
def gla(layer, x, memory=None, causal=True):
    q, k, v = tensors(layer, x)
    gates = sigmoid(layer.decay_up_proj(layer.decay_down_proj(x[0]))) ** (1 / layer.spec.tau)
    decay = gates.view(len(x[0]), layer.num_heads, -1).transpose(0, 1)
    found, weights = recurrence(q * layer.key_width**-0.5, k, v, decay)
    out = normed(layer, joined(found), layer.num_heads) * per_head(layer) * silu(layer.gate_proj(x[0]))
    return layer.o_proj(out)[None], weights


def hgrn2(layers, x, memory=None, causal=True):
    """Lower bounds are sums of shares of the layers below, without that of layer 0."""
    shares = torch.exp(layers[0].lower_bounds) / torch.exp(layers[0].lower_bounds).sum(0)

    @both_ways
    def of_layer(layer, x, memory=None, causal=True):
        least = sum((shares[below] for below in range(1, layer.layer_idx + 1)), torch.zeros_like(shares[0]))
        q, forget, v = tensors(layer, x)
        own, heads = least.split(layer.key_width), layer.num_heads
        least = torch.stack([own[h * len(own) // heads] for h in range(heads)])[:, None]
        forget = least + (1 - least) * sigmoid(forget)
        read, weights = recurrence(silu(q), 1 - forget, v, forget)
        return layer.o_proj(normed(layer, joined(read), 1) * layer.output_norm.weight)[None], weights

    found = []
    for layer in layers:
        found.append(of_layer(layer, x, causal=causal))
        x = x + found[-1][0]
    return found


def rwkv7(layers, x, memory=None, causal=True):
    """Token by token as the released code has it: the state is read before it decays."""
    found, first = [], None
    for number, layer in enumerate(layers):
        n, heads, width = x.shape[1], layer.num_heads, layer.key_width
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)[0]
        xr, xw, xk, xv, xa, xg = (x[0] + (before - x[0]) * m for m in layer.mix)

        def low(name, y, inner=lambda y: y, layer=layer):
            up = getattr(layer, f"{name}_up_proj")
            mapped = inner(y @ getattr(layer, f"{name}_down_proj").weight.T) @ up.weight.T
            return mapped if up.bias is None else mapped + up.bias

        r, k, v = layer.q_proj(xr), layer.k_proj(xk), layer.v_proj(xv)
        decay, rate = torch.exp(-math.exp(-0.5) * sigmoid(low("decay", xw, torch.tanh))), sigmoid(low("rate", xa))
        if number:
            v = v + (first - v) * sigmoid(low("value", xv))
        first = v if first is None else first
        directions, k = (k * layer.key_scale).split(width, -1), k * (1 + (rate - 1) * layer.key_rate)
        weights, parts = torch.zeros(1, heads, n, n, dtype=torch.float64), []
        for h in range(heads):
            at, of = slice(h * width, (h + 1) * width), slice(h * layer.value_width, (h + 1) * layer.value_width)
            state = torch.zeros(width, n, dtype=torch.float64)  # of each value of the text
            for t in range(n):
                kk = directions[h][t] / directions[h][t].norm()
                held = kk @ state
                state = decay[t, at][:, None] * state - torch.outer(kk * rate[t, at], held)
                state[:, t] += k[t, at]
                weights[0, h, t] = r[t, at] @ state
            read = weights[0, h] @ v[:, of]
            read = read - read.mean(-1, keepdim=True)
            read = read / (read.square().mean(-1, keepdim=True) + layer.spec.eps(layer.config)).sqrt()
            own = (r[:, at] * k[:, at] * layer.bonus[h]).sum(-1, keepdim=True)
            parts.append(read * layer.norm_weight[of] + layer.norm_bias[of] + own * v[:, of])
        found.append((layer.o_proj(torch.cat(parts, -1) * low("gate", xg, sigmoid))[None], weights))
        x = x + found[-1][0]
    return found


@both_ways
def retnet(layer, x, memory=None, causal=True):
    """Complex numbers turned by e^{i n theta}, and decays by distance."""
    q, k, v = tensors(layer, x)
    n, width = q.shape[1:]
    rates = torch.tensor([10000 ** -(c / max(width // 2 - 1, 1)) for c in range(width // 2)], dtype=torch.float64)
    turns = torch.exp(1j * torch.arange(n, dtype=torch.float64)[:, None] * rates)
    q, k = (torch.complex(y[..., 0::2], y[..., 1::2]) * turns for y in (q, k))
    weights = torch.zeros(1, layer.num_heads, n, n, dtype=torch.float64)
    for h in range(layer.num_heads):
        for i in range(n):
            for j in range(i + 1):
                product = (q[h, i] * k[h, j].conj()).sum().real / math.sqrt(width)
                weights[0, h, i, j] = product * (1 - 2.0 ** (-5 - h)) ** (i - j)
    out = normed(layer, joined(weights @ v), layer.num_heads) * silu(layer.gate_proj(x[0]))
    return layer.o_proj(out)[None], weights


@both_ways
def lightning_attention(layer, x, memory=None, causal=True):
    q, k, v = (silu(y) for y in tensors(layer, x))
    heads, last = layer.num_heads, layer.config.num_hidden_layers - 1
    part = 1 - layer.layer_idx / (last + 1e-5) + 1e-5
    decay = torch.tensor([math.exp(-(2 ** (-8 * (h + 1) / heads)) * part) for h in range(heads)], dtype=torch.float64)
    found, weights = recurrence(q, k, v, decay[:, None].expand(-1, q.shape[1]))
    out = normed(layer, joined(found), 1) * layer.output_norm.weight * sigmoid(layer.gate_proj(x[0]))
    return layer.o_proj(out)[None], weights


def constants(layer):
    """Of layers built without a model."""
    layer.decay.initialize(layer.config, initialization)


COMMON = {"steady": True}
RANKS = {"decay_rank": 3, "rate_rank": 5, "value_rank": 2, "gate_rank": 4}
MORE_VALUES = {"key_heads": 2, "value_heads": 4, "key_width": 6, "value_width": 3, "chunk_size": 4}
FEWER_VALUES = {"key_heads": 4, "value_heads": 2, "chunk_size": 4}
# fmt: off
REFERENCES = {
    **rows("gated_delta_net", gated_delta_net, "gated_delta_net", {
        "": ({"chunk_size": 4},),
        "grouped": ({"conv": 0, "bias": True}, {"fields": GROUPED}),
        "more values": ({**MORE_VALUES, "conv": 3, "negative": True},),
        "fewer values": (FEWER_VALUES,),
    }, **COMMON),
    **rows("kimi_delta_attention", kimi_delta_attention, "kimi_delta_attention", {
        "": ({"chunk_size": 4},),
        "more values": ({**MORE_VALUES, "gate_rank": 3, "negative": True},),
        "grouped": ({"conv": 0}, {"fields": GROUPED}),
    }, **COMMON),
    **rows("delta_product", delta_product, "gated_delta_net", {
        "": ({"num_householder": 2, "negative": True, "chunk_size": 4},),
        "three": ({**MORE_VALUES, "num_householder": 3, "conv": 0},),
        "grouped": ({"num_householder": 2}, {"fields": GROUPED}),
    }, **COMMON),
    **rows("kimi_delta_product", delta_product, "kimi_delta_attention", {
        "": ({"num_householder": 2, "gate_rank": 3, "negative": True},),
    }, **COMMON),
    **rows("mamba2", mamba2, "mamba2", {
        "": ({"key_heads": 1, "key_width": 6, "chunk_size": 4},),
        "groups": ({**MORE_VALUES, "bias": True, "least_step": 0.5, "most_step": 0.9},),
        "norm first": ({"gate_norm": "norm_first", "conv": 0}, {"fields": GROUPED}),
        "no norm": ({"gate_norm": "none", "part_scales": [0.7, 1.3, 0.6, 1.2, 0.8]},),
    }, **COMMON),
    **rows("gla", gla, "gla", {
        "": ({"chunk_size": 4},),
        "strong": ({**MORE_VALUES, "tau": 0.05, "gate_rank": 3, "conv": 2},),
        "grouped": ({}, {"fields": GROUPED}),
    }, **COMMON),
    **rows("hgrn2", hgrn2, "hgrn2", {
        "": ({"chunk_size": 4},),
        "more values": (MORE_VALUES,),
        "grouped": ({}, {"fields": GROUPED}),
    }, chain=True, layers=3, **COMMON),
    **rows("rwkv7", rwkv7, "rwkv7", {
        "": ({"chunk_size": 4, **RANKS},),
        "wide values": ({"key_width": 3, "value_width": 5, "norm_eps": 0.1, "bias": True, **RANKS},),
    }, chain=True, layers=2, causal=DECODER, **COMMON),
    **rows("retnet", retnet, "retnet", {
        "": ({"chunk_size": 4},),
        "more values": (MORE_VALUES,),
    }, **COMMON),
    **rows("lightning_attention", lightning_attention, "lightning_attention", {
        "": ({"chunk_size": 4}, {"layer_idx": 1}),
        "last": ({}, {"layer_idx": 2, "layers": 3}),
    }, prepare=constants, **COMMON),
}
# fmt: on
