"""Literal equations of attention by products of features, one query and one key at a time, and of its states."""

import math

import torch

from hf_xformers.ops.linear.feature_maps import dpfp_reference
from tests.attention.references.table import (
    DECODER,
    GROUPED,
    D,
    drawn,
    elu_features,
    heads_of,
    rows,
    visible,
    written,
)
from tests.attention.score_helpers import HEADS, WIDTH, split_heads


def weighted(layer, products, v):
    """Sums over products [1, H, n, m], and zeros where there are none."""
    sums = products.sum(-1, keepdim=True)
    weights = torch.where(sums > 0, products / sums.clamp(min=1e-300), 0.0)
    return written(layer, weights @ v), weights


def linear_transformer(layer, x, memory=None, causal=False, turn=lambda x: x):
    """phi(q) phi(k) over its sum; a rotation turns the numerator alone."""
    q, k, v = heads_of(layer, x, memory)
    phi_q, phi_k = elu_features(q), elu_features(k)
    seen = visible(q.shape[2], k.shape[2], causal)
    totals = (phi_q @ phi_k.mT * seen).sum(-1, keepdim=True) + layer.spec.eps
    weights = turn(phi_q) @ turn(phi_k).mT * seen / totals
    return written(layer, weights @ v), weights


def performer(layer, x, memory=None, causal=False, turn=lambda x: x):
    """The features as they stand in the paper, and all pairs of them."""
    q, k, v = heads_of(layer, x, memory, turn)
    w = layer.directions

    def phi(x):
        x = x * D**-0.25
        norm = torch.exp(-(x**2).sum(-1, keepdim=True) / 2)
        if layer.spec.feature_kind == "positive":
            return norm * torch.exp(x @ w.t()) / len(w) ** 0.5
        return norm * torch.cat([torch.exp(x @ w.t()), torch.exp(-x @ w.t())], -1) / (2 * len(w)) ** 0.5

    return weighted(layer, phi(q) @ phi(k).mT * visible(q.shape[2], k.shape[2], causal), v)


def kernel_features(layer, x, head):
    """Of one vector: numbers, and the logarithm of a factor of the vector."""
    spec, log = layer.spec, 0.0
    if spec.type == "dpfp":
        found = dpfp_reference(x, spec.nu)
        return (found / found.sum() if spec.sum_normalize else found), log
    if spec.type == "rfa" or (spec.type == "arccos_attention" and spec.normalize_qk):
        x = x / (x.norm() ** 2 + 1e-6) ** 0.5
    if spec.type == "performer":
        x = x * D**-0.25
    rows = layer.directions if layer.num_rows is not None else None
    if spec.type == "rfa":
        rows = rows[head] * (layer.sigma[head] if spec.learn_sigma else 1.0) / spec.tau
    kind = {"performer": "feature_kind", "rfa": "feature_map"}.get(spec.type)
    kind = "relu" if kind is None else getattr(spec, kind)
    if kind in ("relu", "arccos"):
        products = x if rows is None else torch.stack([row @ x for row in rows]) / len(rows) ** 0.5
        return torch.tensor([max(float(y), 0.0) + 1e-3 for y in products], dtype=torch.float64), log
    if kind == "trigonometric":
        log = float(x @ x) / 2
    angles = [float(row @ x) for row in rows]
    found = [math.cos(y) for y in angles] + [math.sin(y) for y in angles]
    return torch.tensor(found, dtype=torch.float64) / len(rows) ** 0.5, log


def kernel_attention(layer, x, memory=None, causal=False, turn=lambda x: x):
    q, k, v = heads_of(layer, x, memory, turn)
    spec, (queries, keys) = layer.spec, (q.shape[2], k.shape[2])
    gates = None
    if getattr(layer, "decay_proj", None) is not None:
        gates = torch.sigmoid(layer.decay_proj(x)).transpose(1, 2)[0]
    least, eps = getattr(spec, "min_denominator", 0.0), getattr(spec, "eps", 0.0)
    guarded = (spec.type, getattr(spec, "feature_map", "")) != ("rfa", "arccos")
    guarded = guarded and getattr(spec, "feature_kind", "trigonometric") == "trigonometric"
    weights = torch.zeros(1, HEADS, queries, keys, dtype=torch.float64)
    for h in range(HEADS):
        of_keys = [kernel_features(layer, y, h) for y in k[0, h]]
        for i in range(queries):
            phi_q, _ = kernel_features(layer, q[0, h, i], h)
            factors = {}
            for j in range(i + 1 if causal else keys):
                factors[j] = math.exp(of_keys[j][1])
                if gates is not None:
                    passed = math.prod(gates[h, j + 1 : i + 1].tolist())
                    factors[j] *= float(1 - gates[h, j]) * passed
            products = {j: float(phi_q @ of_keys[j][0]) * factor for j, factor in factors.items()}
            if spec.type == "dpfp" and not spec.has_denominator:
                total, top = 1 / (D**-0.5 if spec.scale is None else spec.scale), 1.0
            else:
                top = max(factors.values())
                total = sum(products.values()) / top + eps
                if guarded and abs(total) < least:
                    total = -least if total < 0 else least
            for j, product in products.items():
                weights[0, h, i, j] = product / top / total if total else 0.0
    return written(layer, weights @ v), weights


def kernel_start(layer):
    drawn(layer)
    if getattr(layer, "sigma", None) is not None:
        layer.sigma.add_(1.0)


def learned_features(layer, head, x, side):
    """Of one vector, for one head: T2R's are of one sign, Hedgehog's and LoLCATs' a softmax of either sign."""
    spec = layer.spec
    root = 1.0 if spec.scale is None or spec.type == "lolcats" else spec.scale**0.5
    maps = layer.feature_map if spec.type == "t2r" else getattr(layer, f"{side}_map")
    y = [float(row @ (root * x) + bias) for row, bias in zip(maps.weight[head], maps.bias[head])]
    if spec.type == "t2r":
        return torch.tensor([max(value, 0.0) for value in y], dtype=torch.float64)
    found = []
    for sign in (1, -1):
        total = sum(math.exp(sign * value) for value in y)
        found += [math.exp(sign * value) / total for value in y]
    return torch.tensor(found, dtype=torch.float64)


def learned_attention(layer, x, memory=None, causal=False, turn=lambda x: x):
    q, k, v = heads_of(layer, x, memory, turn)
    spec, (queries, keys) = layer.spec, (q.shape[2], k.shape[2])
    weights = torch.zeros(1, HEADS, queries, keys, dtype=torch.float64)
    for h in range(HEADS):
        of_keys = [learned_features(layer, h, y, "key") for y in k[0, h]]
        for i in range(queries):
            phi_q = learned_features(layer, h, q[0, h, i], "query")
            seen = range(i + 1 if causal else keys)
            near = []
            if spec.type == "lolcats":
                near = [j for j in seen if abs(i - j) < spec.window or j < spec.sinks]
            scale = spec.scale if spec.scale is not None else D**-0.5
            scores = {j: float(q[0, h, i] @ k[0, h, j]) * scale for j in near}
            for j in seen:
                if j in scores:
                    gamma = 1 / (1 + math.exp(-float(layer.mixing[h])))
                    weights[0, h, i, j] = gamma * math.exp(scores[j] - max(scores.values()))
                else:
                    weights[0, h, i, j] = float(phi_q @ of_keys[j])
                    if getattr(spec, "affine", False):  # times 1 - gamma
                        weights[0, h, i, j] /= 1 + math.exp(float(layer.mixing[h]))
    total = weights.sum(-1, keepdim=True) + (spec.eps if spec.type == "t2r" else 0.0)
    weights = torch.where(total > 0, weights / total.clamp(min=1e-300), 0.0)
    mixed = weights @ v
    if spec.type == "t2r" and spec.normalization == "output_norm":
        mixed = mixed / (mixed.square().mean(-1, keepdim=True) + layer.config.layer_norm_eps).sqrt()
        mixed = mixed * layer.output_norm[None, :, None]
    return written(layer, mixed), weights


def delta_features(layer, x):
    spec = layer.spec
    if spec.type == "delta_net" and spec.feature_map == "elu":
        found = elu_features(x)
    elif spec.type == "delta_net" and spec.feature_map == "favor":
        powers = x @ layer.directions.T
        found = torch.exp(-x.square().sum(-1, keepdim=True) / 2) * torch.cat([powers.exp(), (-powers).exp()], -1)
    else:
        found = dpfp_reference(x, spec.nu)
    return found / found.sum(-1, keepdim=True)


def delta_tensors(layer, x, turn=lambda x: x):
    """Features of queries and keys, values and strengths of writing, [B, H, T, ...]."""
    q, k, v = heads_of(layer, x, None, turn)
    beta = torch.sigmoid(x @ layer.beta_proj.weight.t()).transpose(1, 2)
    return delta_features(layer, q), delta_features(layer, k), v, beta


def delta_net(layer, x, memory=None, causal=True, turn=lambda x: x):
    """The rule token by token, of each value's share: what a query reads of the values is the matrix of weights."""
    q, k, v, beta = delta_tensors(layer, x, turn)
    n, divides = x.shape[1], layer.spec.attention_normalize
    weights = torch.zeros(1, HEADS, n, n, dtype=torch.float64)
    for h in range(HEADS):
        memory, norm = torch.zeros(k.shape[-1], n).double(), torch.zeros(k.shape[-1]).double()
        for t in range(n):
            own = torch.zeros(n, dtype=torch.float64)
            own[t] = 1.0
            found = k[0, h, t] @ memory / (k[0, h, t] @ norm + 1e-5 if divides else 1.0)
            memory = memory + beta[0, h, t] * torch.outer(k[0, h, t], own - found)
            norm = norm + k[0, h, t]
            weights[0, h, t] = q[0, h, t] @ memory / D**0.5 / (q[0, h, t] @ norm + 1e-5 if divides else 1.0)
    return written(layer, weights @ v), weights


def average_attention(layer, x, memory=None, causal=True):
    """A token at a time, with a running sum."""
    total, outputs, n = torch.zeros(x.shape[2]).double(), [], x.shape[1]
    for number, y in enumerate(x[0], start=1):
        total = total + y
        g = total / number
        if layer.spec.use_ffn:
            inner = (layer.up_proj.weight @ g + layer.up_proj.bias).clamp(min=0)
            g = layer.down_proj.weight @ inner + layer.down_proj.bias
        if layer.spec.use_gate:
            gates = 1 / (1 + torch.exp(-(layer.gate_proj.weight @ torch.cat((y, g)) + layer.gate_proj.bias)))
            g = gates[:WIDTH] * y + gates[WIDTH:] * g
        outputs.append(g)
    weights = torch.ones(n, n).double().tril() / torch.arange(1, n + 1)[:, None]
    return torch.stack(outputs)[None], weights.expand(1, HEADS, n, n)


def luna_read(query, key, value, heads, seen=None):
    """softmax(q k^T / sqrt(d)) v by heads, [1, n, heads * d], over the first `seen` keys."""
    d = query.shape[-1] // heads
    q, k, v = (split_heads(x, d) for x in (query, key[:, :seen], value[:, :seen]))
    weights = torch.softmax(q @ k.mT / d**0.5, -1)
    return (weights @ v).transpose(1, 2).flatten(2), weights


def luna(layers, x, memory=None, causal=False):
    """Pack and unpack, and the memory on its way through the layers; in a decoder two running sums instead."""
    handed, outputs, length = layers[0].memory[None], [], layers[0].spec.projected_length
    for layer in layers:
        if causal:
            outputs.append(luna_decoder(layer, x, layers[0].memory[None]))
            x = x + outputs[-1][0]
            continue
        read, heads = x if memory is None else memory, layer.spec.pack_heads or HEADS
        value_proj = layer.pack_v_proj or layer.pack_k_proj
        packed, packing = luna_read(layer.pack_q_proj(handed), layer.pack_k_proj(read), value_proj(read), heads)
        slots = min(length, read.shape[1]) if layer.spec.dynamic_projection and memory is None else length
        value_proj = layer.v_proj or layer.k_proj
        found, reading = luna_read(layer.q_proj(x), layer.k_proj(packed), value_proj(packed), HEADS, slots)
        packing = packing if heads == HEADS else packing.mean(1, keepdim=True)
        outputs.append((layer.o_proj(found), reading @ packing[:, :, :slots]))
        handed = None if layer.memory_norm is None else layer.memory_norm(handed + packed)
        x = x + outputs[-1][0]
    return outputs


def luna_decoder(layer, x, handed):
    """One head and one token at a time; what is read of each value is its weight."""
    q, k = split_heads(layer.q_proj(x), D), split_heads(layer.k_proj(x), D)
    v = k if layer.v_proj is None else split_heads(layer.v_proj(x), D)
    p, n = split_heads(layer.pack_q_proj(handed), D), x.shape[1]
    weights = torch.zeros(1, HEADS, n, n, dtype=torch.float64)
    for h in range(HEADS):
        keys, opened = torch.zeros(D, p.shape[2]).double(), []
        for t in range(n):
            opened.append(elu_features(p[0, h] @ k[0, h, t] / D**0.5))
            keys = keys + torch.outer(k[0, h, t], opened[-1])
            reading = torch.softmax(q[0, h, t] @ keys / D**0.5 / (t + 1), -1)
            weights[0, h, t, : t + 1] = torch.stack(opened) @ reading / (t + 1)
    return written(layer, weights @ v), weights


SMALL, CHUNK = {"num_features": 10, "chunk_size": 4}, {"chunk_size": 4}
LUNA = {"projected_length": 4, "chunk_size": 4}
KERNEL = {"fields": GROUPED, "prepare": kernel_start, "steady": True}

# fmt: off
REFERENCES = {
    **rows("linear_transformer", linear_transformer, "linear_transformer", {
        "": (CHUNK, {"cross": True, "fields": GROUPED, "steady": True, "turns": True}),
        "eps": ({"eps": 0.5, **CHUNK},),
    }),
    **rows("performer", performer, "performer", {
        "positive": ({"feature_kind": "positive", **SMALL},),
        "hyperbolic": ({"feature_kind": "hyperbolic", **SMALL},),
    }, cross=True, fields=GROUPED, prepare=drawn, steady=True, turns=True),
    **rows("performer", kernel_attention, "performer", {
        "trigonometric": ({"feature_kind": "trigonometric", **SMALL}, {"turns": True, "rounds": False}),
        "guarded": ({"feature_kind": "trigonometric", "min_denominator": 0.6, **SMALL}, {"cross": True}),
        "relu": ({"feature_kind": "relu", **SMALL},),
    }, **KERNEL),
    **rows("arccos", kernel_attention, "arccos_attention", {
        "": (SMALL, {"turns": True}),
        "plain": ({"num_features": None, **CHUNK},),
        "unit": ({"normalize_qk": True, **SMALL}, {"cross": True}),
    }, **KERNEL),
    **rows("rfa", kernel_attention, "rfa", {
        "": ({"tau": 0.8, **SMALL}, {"cross": True}),
        "guarded": ({"min_denominator": 2.0, **SMALL}, {"cross": True}),
        "arccos": ({"feature_map": "arccos", "learn_sigma": False, **SMALL},),
        "gate": ({"gate": True, **SMALL}, {"causal": DECODER, "turns": True}),
    }, draws=True, **KERNEL),
    **rows("dpfp", kernel_attention, "dpfp", {
        "": ({"nu": 2, **CHUNK}, {"cross": True, "turns": True}),
        "sums": ({"attention_normalize": False, **CHUNK}, {"cross": True}),
        "raw": ({"nu": 1, "sum_normalize": False, "eps": 0.5, **CHUNK},),
        "raw sums": ({"sum_normalize": False, "attention_normalize": False, "scale": 0.3},),
    }, **KERNEL),
    **rows("hedgehog", learned_attention, "hedgehog", {
        "": (CHUNK, {"cross": True, "turns": True}),
        "wide": ({"num_features": 6, "scale": 0.5, **CHUNK},),
    }, fields=GROUPED, steady=True),
    **rows("t2r", learned_attention, "t2r", {
        "": ({"num_features": 7, **CHUNK}, {"cross": True, "turns": True}),
        "supra": ({"normalization": "output_norm", **CHUNK}, {"cross": True}),
    }, fields=GROUPED, steady=True),
    **rows("lolcats", learned_attention, "lolcats", {
        "": ({"window": 3, **CHUNK}, {"turns": True}),
        "short": ({"window": 1, "chunk_size": 2, "scale": 0.7},),
        "long": ({"window": 9, "chunk_size": 2}, {"steady": False}),  # longer than most texts here
        "sinks": ({"window": 3, "sinks": 2, "affine": True, "gamma": 0.8, **CHUNK}, {"turns": True}),
        "chunks": ({"window": 5, "chunk_size": 2, "sinks": 1},),
        "many sinks": ({"window": 2, "chunk_size": 2, "sinks": 5},),
    }, fields=GROUPED, steady=True),
    **rows("delta_net", delta_net, "delta_net", {
        "dpfp": (CHUNK,),
        "dpfp 1": ({"nu": 1, "chunk_size": 3, "bias": False},),
        "elu": ({"feature_map": "elu", "chunk_size": 5},),
        "favor": ({"feature_map": "favor", "num_features": 3, **CHUNK},),
        "normalized": ({"attention_normalize": True, **CHUNK},),
        "favor normalized": ({"feature_map": "favor", "attention_normalize": True, "chunk_size": 3},),
    }, causal=DECODER, fields=GROUPED, prepare=drawn, steady=True, turns=True),
    **rows("average", average_attention, "average_attention", {
        "whole": ({},),
        "narrow": ({"ffn_size": 5},),
        "gate": ({"use_ffn": False},),
        "ffn": ({"use_gate": False},),
        "plain": ({"use_ffn": False, "use_gate": False},),
    }, causal=DECODER, steady=True),
    **rows("luna", luna, "luna", {
        "tied": (LUNA,),
        "untied": ({"tie_kv": False, **LUNA},),
        "two heads pack": ({"pack_heads": 2, **LUNA},),
        "static": ({"dynamic_projection": False, "bias": False, **LUNA},),
    }, cross=True, chain=True, layers=3, steady=True),
}
# fmt: on
