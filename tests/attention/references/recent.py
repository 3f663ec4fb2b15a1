"""Softmax mechanisms of 2024 and later."""

import math
from functools import partial

import torch

from tests.attention.references.table import BLOCKS, DECODER, GROUPED, WIDE, Reference, rows, visible, written
from tests.attention.score_helpers import HEADS, softmax_by_rows, split_heads


def differential(layer, x, memory=None, causal=False, bias=None, turn=lambda x: x):
    """Eq. 1 pair by pair, with values of double width, and the norm of each pair written out."""
    read, spec, d = x if memory is None else memory, layer.spec, layer.head_dim
    q, k = turn(split_heads(layer.q_proj(x), d))[0], turn(split_heads(layer.k_proj(read), d))[0]
    v, groups = split_heads(layer.v_proj(read), d)[0], layer.num_key_value_groups
    start = 0.8 - 0.6 * math.exp(-0.3 * layer.layer_idx)
    a, b = (float(p @ s) for p, s in ((layer.lambda_q1, layer.lambda_k1), (layer.lambda_q2, layer.lambda_k2)))
    factor = math.exp(a) - math.exp(b) + start
    allowed = torch.ones(q.shape[1], k.shape[1]).bool()
    allowed = allowed.tril() if causal else allowed
    weights = torch.zeros(1, HEADS, q.shape[1], k.shape[1], dtype=torch.float64)
    for h in range(HEADS):
        scores = q[h] @ k[h // groups].T / math.sqrt(d) + (0.0 if bias is None else bias[h])
        weights[0, h] = softmax_by_rows(scores, allowed)
    parts, half = [], len(v) // 2
    for p in range(HEADS // 2):
        first, second = (2 * p, 2 * p + 1) if spec.pairing == "neighbors" else (p, p + HEADS // 2)
        pairs = []
        for h in (first, second):  # grouped queries read the values of the pair that their key head belongs to
            g = h // groups
            own = (g // 2 * 2, g // 2 * 2 + 1) if spec.pairing == "neighbors" else (g % half, g % half + half)
            pairs.append(weights[0, h] @ torch.cat([v[i] for i in own], -1))
        row = pairs[0] - factor * pairs[1]
        row = row / (row.square().mean(-1, keepdim=True) + layer.config.layer_norm_eps).sqrt()
        parts.append((1 - start) * row * (layer.pair_norm.weight if spec.norm_weight else 1.0))
    return layer.o_proj(torch.cat(parts, -1))[None], weights


def latent(layer, x, memory=None, causal=False, bias=0.0, turn=lambda x: x):
    """Section 2.1 head by head, with keys and values of every head written out."""
    spec, n = layer.spec, layer.spec.qk_nope_head_dim

    def normed(rows, norm):
        return rows / (rows.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * norm.weight

    states = x if layer.q_down_proj is None else normed(layer.q_down_proj(x), layer.q_down_norm)
    down = layer.kv_down_proj(x)
    c, shared = normed(down[..., : spec.kv_lora_rank], layer.kv_down_norm), turn(down[:, None, :, spec.kv_lora_rank :])
    q = split_heads(layer.q_proj(states), n + spec.qk_rope_head_dim)
    k, v = split_heads(layer.k_proj(c), n), split_heads(layer.v_proj(c), spec.v_head_dim)
    scores = q[..., :n] @ k.mT + turn(q[..., n:]) @ shared.mT
    scores = scores / math.sqrt(n + spec.qk_rope_head_dim) + bias
    weights = softmax_by_rows(scores, visible(x.shape[1], x.shape[1], causal))
    return written(layer, weights @ v), weights


def cross_layer(layers, x, memory=None, causal=False, bias=0.0, turn=lambda x: x):
    """Layers that have keys make them, the others read the last ones."""
    found = []
    for layer in layers:
        d, groups = layer.head_dim, layer.num_key_value_groups
        if layer.k_proj is not None:
            k = turn(split_heads(layer.k_proj(x), d)).repeat_interleave(groups, 1)
            v = split_heads(layer.v_proj(x), d).repeat_interleave(groups, 1)
        scores = turn(split_heads(layer.q_proj(x), d)) @ k.mT / math.sqrt(d) + bias
        weights = softmax_by_rows(scores, visible(x.shape[1], x.shape[1], causal))
        found.append((written(layer, weights @ v), weights))
        x = x + found[-1][0]
    return found


def forgetting(layer, x, memory=None, causal=True, reach=99):
    """Every pair's gates in between summed one by one. reach: of a window, in tokens."""
    terms, groups, n = layer.position_terms, layer.num_key_value_groups, x.shape[1]
    q, k, v = (split_heads(part(x), layer.head_dim)[0] for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    gates = -torch.log1p(torch.exp(-(x[0] @ terms.forget_proj.weight.T + terms.forget_proj.bias)))
    weights, mixed = (
        torch.zeros(1, HEADS, n, n, dtype=torch.float64),
        torch.zeros(1, HEADS, n, layer.head_dim).double(),
    )
    for h in range(HEADS):
        for i in range(n):
            seen = range(max(0, i - reach + 1), i + 1)
            scores = [float(q[h, i] @ k[h // groups, j]) / math.sqrt(layer.head_dim) for j in seen]
            powers = [math.exp(s + float(gates[j + 1 : i + 1, h].sum())) for s, j in zip(scores, seen)]
            for power, j in zip(powers, seen):
                weights[0, h, i, j] = power / sum(powers)
                mixed[0, h, i] += power / sum(powers) * v[h // groups, j]
    return written(layer, mixed), weights


def moba(layer, x, memory=None, causal=False, turn=lambda x: x):
    """Token by token: the own block, and the others with the best mean keys."""
    size, count, n, d = layer.spec.block_size, layer.spec.num_blocks, x.shape[1], layer.head_dim
    q, k = turn(split_heads(layer.q_proj(x), d))[0], turn(split_heads(layer.k_proj(x), d))[0]
    allowed = torch.zeros(1, HEADS, n, n, dtype=torch.bool)
    for h in range(HEADS):
        key = k[h // layer.num_key_value_groups]
        means = [key[start : start + size].mean(0) for start in range(0, n, size)]
        for i in range(n):
            others = [c for c in range(len(means)) if (c < i // size if causal else c != i // size)]
            others.sort(key=lambda c: -float(q[h, i] @ means[c]))
            for c in (i // size, *others[: count - 1]):
                allowed[0, h, i, c * size : min((c + 1) * size, i + 1 if causal else n)] = True
    k, v = (y.repeat_interleave(layer.num_key_value_groups, 0) for y in (k, split_heads(layer.v_proj(x), d)[0]))
    weights = softmax_by_rows((q @ k.mT / math.sqrt(d))[None], allowed)
    return written(layer, weights @ v), weights


def native_sparse(layer, x, memory=None, causal=True, turn=lambda x: x):
    """Eqs. 5 to 12 token by token, with means for the compression."""
    spec, n, d, groups = layer.spec, x.shape[1], layer.head_dim, layer.num_key_value_groups
    size, scale = spec.block_size, layer.head_dim**-0.5
    q, k = turn(split_heads(layer.q_proj(x), d))[0], turn(split_heads(layer.k_proj(x), d))[0]
    v, gates = split_heads(layer.v_proj(x), d)[0], (1 / (1 + torch.exp(-layer.branch_proj(x))))[0].view(n, HEADS, 3)
    weights, blocks = torch.zeros(1, HEADS, n, n, dtype=torch.float64), -(-n // size)
    for g in range(len(k)):
        means = torch.stack([k[g, start : start + size].mean(0) for start in range(0, n, size)])
        heads = range(g * groups, (g + 1) * groups)
        for i in range(n):
            own, over = i // size, (i + 1) // size
            shares = [torch.softmax(means[:over] @ q[h, i] * scale, -1) for h in heads]
            always = [c for c in dict.fromkeys((0, own, own - 1)) if c >= 0]
            rest = sorted(set(range(over)) - set(always), key=lambda c: -float(sum(share[c] for share in shares)))
            chosen = (always + rest)[: min(spec.num_blocks, blocks)]
            seen = [j for j in range(i + 1) if j // size in chosen]
            near = list(range(max(0, i - spec.window_size + 1), i + 1))
            for h, share in zip(heads, shares):
                for c in range(over):
                    weights[0, h, i, c * size : (c + 1) * size] += gates[i, h, 0] * share[c] / size
                for place, keys in ((1, seen), (2, near)):
                    weights[0, h, i, keys] += gates[i, h, place] * torch.softmax(k[g, keys] @ q[h, i] * scale, -1)
    return written(layer, weights @ v.repeat_interleave(groups, 0)), weights


LATENT = {"kv_lora_rank": 7, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5}


GATES, FIVE = {"position": "forget_gate"}, {"num_hidden_layers": 5}

# fmt: off
REFERENCES = {
    **rows("differential", differential, "differential_attention", {
        "": ({}, {"cross": True, "bias": True, "turns": True, "layer_idx": 1}),
        "grouped": ({"bias": True}, {"cross": True, "fields": GROUPED}),
        "halves": ({"pairing": "halves", "norm_weight": False}, {"bias": True, "turns": True}),
        "halves grouped": ({"pairing": "halves"}, {"fields": GROUPED, "layer_idx": 2}),
    }),
    **rows("forgetting", forgetting, "dense", {
        "": ({}, {"paths": BLOCKS}),
        "grouped": ({"bias": False}, {"fields": {**GATES, **GROUPED}}),
    }, causal=DECODER, fields=GATES),
    "forgetting band": Reference({"type": "band_attention", "window_size": 4}, partial(forgetting, reach=4),
                                 causal=DECODER, fields={**GATES, **GROUPED}),
    **rows("moba", moba, "moba", {
        "": ({"block_size": 3, "num_blocks": 2}, {"turns": True}),
        "grouped": ({"block_size": 2, "num_blocks": 3, "bias": False}, {"fields": GROUPED}),
        "own": ({"block_size": 4, "num_blocks": 1}, {"fields": WIDE}),
    }, paths=("eager", "sdpa", "groups"), rounds=False),
    **rows("native_sparse", native_sparse, "native_sparse_attention", {
        "": ({"block_size": 2, "num_blocks": 4, "window_size": 3}, {"fields": GROUPED, "turns": True}),
        "all": ({"block_size": 3, "num_blocks": 9, "window_size": 1, "bias": True},),
    }, causal=DECODER, paths=("eager", "sdpa", "groups"), rounds=False),
    **rows("cross_layer", cross_layer, "cross_layer_attention", {
        "": ({"bias": False}, {"layers": 3, "turns": True}),
        "threes": ({"sharing_factor": 3}, {"fields": {**FIVE, **GROUPED}}),
        "all above": ({"sharing_factor": None, "first_layer": 2}, {"fields": {**FIVE, **WIDE}}),
    }, chain=True, layers=5, bias=True),
    **rows("latent", latent, "multi_head_latent_attention", {
        "": (LATENT, {"bias": True, "turns": True}),
        "rank": ({**LATENT, "q_lora_rank": 6, "bias": True, "norm_eps": 0.1}, {"turns": True}),
        "wide values": ({**LATENT, "v_head_dim": 9, "output_bias": True},),
    }),
}
# fmt: on
