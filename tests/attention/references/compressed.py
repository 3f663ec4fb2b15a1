"""Literal equations of attention that reads a shorter text: projections, landmarks, clusters, slots, permutations."""

import math

import torch
from torch import nn
from torch.nn.functional import relu

from tests.attention.references.table import (
    DECODER,
    ENCODER,
    GROUPED,
    D,
    Reference,
    heads_of,
    rows,
    visible,
    written,
)
from tests.attention.score_helpers import HEADS, WIDTH, softmax_by_rows, split_heads

N, K = 13, 3  # places and rows of Linformer's projections


def linformer(layers, x, memory=None, causal=False):
    """One head at a time; all layers have the projections of the first where those are shared."""
    outputs = []
    for layer in layers:
        owner = layers[0] if layer.spec.sharing == "layerwise" else layer
        read = x if memory is None else memory
        compress = projected_rows if layer.spec.projection == "linear" else block_rows
        q, count = split_heads(layer.q_proj(x), D), read.shape[1]
        mixed, weights = torch.zeros_like(q), torch.zeros(1, HEADS, x.shape[1], count, dtype=q.dtype)
        for h in range(HEADS):
            group = h * layer.num_key_value_heads // HEADS
            k, v = (split_heads(part(read), D)[0, group] for part in (layer.k_proj, layer.v_proj))
            (short_k, _), (short_v, tokens) = (
                compress(owner, layer, each, h, group, at) for at, each in ((0, k), (1, v))
            )
            shares = torch.softmax(q[0, h] @ short_k.t() / D**0.5, -1)
            mixed[0, h], weights[0, h] = shares @ short_v, shares @ tokens
        outputs.append((written(layer, mixed), weights))
        x = x + outputs[-1][0]
    return outputs


def projected_rows(owner, layer, each, h, group, at):
    """E k or F v of one head, and how much of each token is in a row."""
    matrix = owner.key_projection if at == 0 or owner.value_projection is None else owner.value_projection
    if matrix.ndim == 3:
        matrix = matrix.repeat_interleave(HEADS // matrix.shape[0], 0)[h]
    return matrix[:, : len(each)] @ each, matrix[:, : len(each)]


def block_rows(owner, layer, each, h, group, at):
    """One block of n / k tokens at a time: its mean, its maxima, or a convolution with as many taps."""
    size, how, rows = -(-N // K), layer.spec.projection, []
    blocks = torch.arange(len(each)).split(size)
    tokens = torch.zeros(len(blocks), len(each), dtype=each.dtype)
    for number, block in enumerate(blocks):
        tokens[number, block] = 1 / len(block)
        if how == "conv":
            kernel = owner.key_projection if at == 0 or layer.value_projection is None else layer.value_projection
            kernel = kernel[group] if kernel.ndim == 3 else kernel
            taps = kernel.view(D, size, D)  # what channel c takes of channel e of the t-th token
            rows.append(sum(taps[:, t] @ each[place] for t, place in enumerate(block)))
        else:
            rows.append(each[block].mean(0) if how == "mean" else each[block].amax(0))
    return torch.stack(rows), tokens


def pinv(matrix, steps):
    """Equation 11, from the start 1 / (|A|_1 |A|_inf) A^T."""
    if steps is None:
        return torch.linalg.pinv(matrix)
    found, one = matrix.t() / (matrix.sum(0).max() * matrix.sum(1).max()), torch.eye(len(matrix)).double()
    for _ in range(steps):
        product = matrix @ found
        found = found / 4 @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return found


def landmarks(q, k, most):
    """Softmax of queries to mean keys, of mean queries to mean keys, and of those to keys, of one head."""
    mean_q, mean_k = (torch.stack([part.mean(0) for part in x.tensor_split(min(most, len(q)))]) for x in (q, k))
    return [(one @ other.t() / D**0.5).softmax(-1) for one, other in ((q, mean_k), (mean_q, mean_k), (mean_q, k))]


def nystromformer(layer, x, memory=None, causal=False):
    q, k, v = (y[0] for y in heads_of(layer, x))
    most, n = layer.spec.num_landmarks, x.shape[1]
    mixed, weights = torch.zeros_like(v), torch.zeros(HEADS, n, n, dtype=v.dtype)
    for h in range(HEADS):
        soft = landmarks(q[h], k[h], most)
        exact = (q[h] @ k[h].t() / D**0.5).softmax(-1)
        weights[h] = soft[0] @ pinv(soft[1], layer.spec.pinv_iterations) @ soft[2] if n > most else exact
        mixed[h] = weights[h] @ v[h]
        if layer.conv is not None:
            kernel = layer.conv.weight[h, 0, :, 0]
            side = len(kernel) // 2
            for i in range(n):
                for offset in range(-side, side + 1):
                    if 0 <= i + offset < n:
                        mixed[h, i] += kernel[side + offset] * v[h, i + offset]
    return written(layer, mixed[None]), weights[None]


def csalr(layer, x, memory=None, causal=False):
    q, k, v = (y[0] for y in heads_of(layer, x))
    ridge, weights = layer.spec.ridge, torch.zeros(HEADS, x.shape[1], x.shape[1], dtype=x.dtype)
    for h in range(HEADS):
        coefficients, middle, reads = landmarks(q[h], k[h], layer.spec.num_landmarks)
        inverse = torch.linalg.inv(middle + ridge * torch.eye(len(middle)).double())
        weights[h] = coefficients @ inverse @ reads * (1 + ridge if layer.spec.renormalize else 1)
    return written(layer, (weights @ v)[None]), weights[None]


def multihead(q_proj, k_proj, v_proj, o_proj):
    """torch's multi-head attention with these projections."""
    made = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double().eval()
    with torch.no_grad():
        made.in_proj_weight.copy_(torch.cat([q_proj.weight, k_proj.weight, v_proj.weight]))
        made.in_proj_bias.copy_(torch.cat([q_proj.bias, k_proj.bias, v_proj.bias]))
        made.out_proj.load_state_dict(o_proj.state_dict())
    return lambda asking, read: made(asking, read, read, average_attn_weights=False)


def multihead_block(block, asking, read):
    """MAB(X, Y) of one text -> its output and weights."""
    found, weights = multihead(block.q_proj, block.k_proj, block.v_proj, block.o_proj)(asking, read)
    hidden = asking + found
    if block.norms is not None:
        hidden = block.norms[0](hidden)
    hidden = hidden + relu(block.up_proj(hidden))
    return hidden if block.norms is None else block.norms[1](hidden), weights


def set_transformer(layer, x, memory=None, causal=False):
    """By torch's own multi-head attention."""
    induced, packing = multihead_block(layer.inducing_block, layer.inducing_points[None], x)
    found, reading = multihead(layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj)(x, induced)
    return found, reading @ packing


def clusters_by_hand(query, planes, most, steps):
    """One text and head [n, d]: Lloyd's k-means among sets of bits -> a cluster for each token."""
    bits = [[float(q @ p[:-1] + p[-1]) > 0 for p in planes] for q in query]
    used = min(most, len(query))
    centroids = [list(bits[c * len(query) // used]) for c in range(used)]

    def nearest(token):
        distances = [sum(a != b for a, b in zip(token, centroid)) for centroid in centroids]
        return distances.index(min(distances))

    for _ in range(steps):
        labels = [nearest(token) for token in bits]
        for c in range(used):
            for r in range(len(planes)):
                ones = sum(1 if bits[i][r] else -1 for i in range(len(bits)) if labels[i] == c)
                if ones:
                    centroids[c][r] = ones > 0
    return [nearest(token) for token in bits]


def clustered_weights(layer, q, k, labels=None):
    """Weights, those of exact attention, and those that a cluster shares, [1, H, n, n]; labels [H, n]: clusters that
    are given."""
    weights, exact, shared = (torch.zeros(1, HEADS, q.shape[2], k.shape[2], dtype=q.dtype) for _ in range(3))
    topk, spec = getattr(layer.spec, "topk", 0), layer.spec
    for h in range(HEADS):
        qs, ks = q[0, h], k[0, h]
        own = clusters_by_hand(qs, layer.planes, spec.num_clusters, spec.lloyd_iterations)
        own = torch.tensor(own) if labels is None else labels[h]
        for i in range(len(qs)):
            mean = qs[own == own[i]].mean(0)
            row = torch.softmax(ks @ mean / D**0.5, 0)
            shared[0, h, i] = row
            exact[0, h, i] = torch.softmax(ks @ qs[i] / D**0.5, 0)
            if topk:
                best = (ks @ mean).topk(min(topk, len(ks))).indices
                row[best] = row[best].sum() * torch.softmax(ks[best] @ qs[i] / D**0.5, 0)
            weights[0, h, i] = row
    return weights, exact, shared


def clustered(layer, x, memory=None, causal=False, labels=None):
    q, k, v = heads_of(layer, x)
    weights, _, _ = clustered_weights(layer, q, k, labels)
    return written(layer, weights @ v), weights


def slots_by_hand(layer, text, causal):
    """One text [n, D]: m_0, and each block's slot with the number of tokens of it."""
    factor, found = layer.spec.compression_factor, [text[0] if layer.null is None else layer.null]
    sizes = [1]
    for start in range(0, len(text), factor):
        block = text[start : start + factor]
        if causal and len(block) < factor:
            continue
        if layer.spec.compress == "conv":
            slot = layer.compress_proj.weight[:, : block.numel()] @ block.flatten() + layer.compress_proj.bias
        else:
            slot = block.mean(0) if layer.spec.compress == "mean" else block.max(0).values
        found.append(slot / (1 + (-slot).exp()) if layer.spec.compress_activation == "silu" else slot)
        sizes.append(len(block))
    return torch.stack(found), sizes


def memory_compressed(layer, x, memory=None, causal=False):
    """One head and one token at a time."""
    read, factor = x if memory is None else memory, layer.spec.compression_factor
    q = split_heads(layer.q_proj(x), D)
    mixed, weights = torch.zeros_like(q), torch.zeros(1, HEADS, x.shape[1], read.shape[1], dtype=q.dtype)
    slots, sizes = slots_by_hand(layer, read[0], causal)
    k, v = (split_heads(part(slots)[None], D)[0] for part in (layer.k_proj, layer.v_proj))
    for h in range(HEADS):
        group = h * k.shape[0] // HEADS
        for i in range(x.shape[1]):
            seen = [s for s in range(len(slots)) if not causal or s * factor <= i]
            shares = torch.softmax(k[group, seen] @ q[0, h, i] / D**0.5, 0)
            mixed[0, h, i] = shares @ v[group, seen]
            for s, share in zip(seen, shares):
                tokens = range((s - 1) * factor, min(s * factor, read.shape[1])) if s else [0] * (layer.null is None)
                for token in tokens:
                    weights[0, h, i, token] += share / sizes[s]
    return written(layer, mixed), weights


def local_blocks(layer, x, memory=None, causal=False):
    """Dense attention among blocks that begin at the first token: the own one, the one before, the one behind."""
    q, k, v = heads_of(layer, x)
    block = torch.arange(x.shape[1]).div(layer.spec.block_size, rounding_mode="floor")
    apart = block[:, None] - block
    seen = (apart >= (0 if causal else -1)) & (apart <= 1) & visible(x.shape[1], x.shape[1], causal)
    weights = softmax_by_rows(q @ k.mT / D**0.5, seen)
    return written(layer, weights @ v), weights


def low_rank_part(layer, x, read, causal):
    """What the module of low rank reads [1, H, n, d], and its weights."""
    rank = layer.spec.low_rank
    q, k = split_heads(layer.low_q_proj(x), rank), split_heads(layer.low_k_proj(read), rank)
    v = split_heads(layer.low_v_proj(read), D)
    k, v = (y.repeat_interleave(HEADS // y.shape[1], 1) for y in (k, v))
    weights = softmax_by_rows(q @ k.mT / rank**0.5, visible(x.shape[1], read.shape[1], causal))
    return weights @ v, weights


def low_rank_band(layer, x, memory=None, causal=False):
    """Both softmaxes written out; a memory is read by the one of low rank alone."""
    if memory is not None:
        far, weights = low_rank_part(layer, x, memory, False)
        return written(layer, far), weights
    far, far_weights = low_rank_part(layer, x, x, causal)
    q, k, v = heads_of(layer, x)
    place = torch.arange(x.shape[1])
    band = visible(len(place), len(place), causal) & ((place[:, None] - place).abs() <= layer.spec.band_width)
    near_weights = softmax_by_rows(q @ k.mT / D**0.5, band)
    near, share, how = near_weights @ v, 0.5, layer.spec.combine
    if how == "gate":
        share = 1 / (1 + (-layer.gate).exp())[:, None, None]
    both = {
        "sum": lambda: far + near,
        "mean": lambda: (far + near) / 2,
        "gate": lambda: share * far + (1 - share) * near,
        "concat": lambda: torch.cat([far, near], 1),
    }[how]()
    return written(layer, both), share * far_weights + (1 - share) * near_weights


def permutation_by_hand(scores, iterations, causal):
    """[n, n] by rows and columns in turn, entry by entry; the last division is that of rows."""
    count = len(scores)
    p = {(c, u): math.exp(scores[c][u]) for c in range(count) for u in range(c if causal else count)}

    def by_rows(p):
        return {(c, u): x / sum(p[c, w] for w in range(count) if (c, w) in p) for (c, u), x in p.items()}

    for _ in range(iterations):
        p = by_rows(p)
        p = {
            (c, u): x / sum(p[w, u] for w in range(c + 1 if causal else count) if (w, u) in p)
            for (c, u), x in p.items()
        }
    return by_rows(p)


def sinkhorn(layer, x, memory=None, causal=False):
    """One block and one place at a time."""
    spec, size, length = layer.spec, layer.spec.block_size, x.shape[1]
    q, k, v = (y[0] for y in heads_of(layer, x))
    text, n = x[0], -(-length // size)
    pooled = [text[: c * size + 1] if causal else text[c * size : c * size + size] for c in range(n)]
    pooled = torch.stack([part.mean(0) for part in pooled])
    scores = layer.sort_out(torch.relu(layer.sort_in(pooled))).view(n, HEADS, -1)[..., :n] / spec.temperature
    found = torch.zeros(1, HEADS, length, D, dtype=torch.float64)
    for h in range(HEADS):
        p = permutation_by_hand(scores[:, h].tolist(), spec.iterations, causal)

        def sorted_place(c, s, p=p, h=h):
            """Key, value and share of real tokens."""
            parts = [(p[c, u], u * size + s) for u in range(n) if (c, u) in p and u * size + s < length]
            share = sum(weight for weight, _ in parts)
            if not share:
                return None
            return (*(sum(w * t[h, j] for w, j in parts) / share for t in (k, v)), math.log(share))

        for i in range(length):
            c, entries = i // size, []
            if spec.sortcut_blocks:
                entries = [sorted_place(b, s) for b in range(min(n, spec.sortcut_blocks)) for s in range(size)]
            else:
                own = range(c * size, min(c * size + size, length))
                entries = [sorted_place(c, s) for s in range(size)]
                entries += [(k[h, j], v[h, j], 0.0) for j in own if j <= i or not causal]
            entries = [entry for entry in entries if entry]
            logits = torch.stack([q[h, i] @ key / D**0.5 + log for key, _, log in entries])
            found[0, h, i] = torch.softmax(logits, -1) @ torch.stack([value for _, value, _ in entries])
    return written(layer, found)


def sample_by_hand(place, number, count, seed):
    """The counter-based generator in whole numbers of Python."""
    found = []
    for k in range(number):
        x = (place * 0x9E3779B1 + k * 0x85EBCA77 + seed) % 2**32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) % 2**32
        found.append(((x ^ (x >> 16)) * count) >> 32)
    return found


def informer(layer, x, memory=None, causal=False):
    """Query by query: those that a sample of keys tells apart attend, the others get a mean or a sum."""
    (q, k, v), spec, n = heads_of(layer, x), layer.spec, x.shape[1]
    number = min(max(spec.sampling_factor * math.ceil(math.log(n)), 1), n)
    seed, mixed = spec.seed * 1009 + layer.layer_idx, torch.zeros_like(v)
    for h in range(HEADS):
        measure = []
        for i in range(n):
            scores = [float(q[0, h, i] @ k[0, h, j]) for j in sample_by_hand(i, number, n, seed)]
            measure.append(max(scores) - sum(scores) / n)
        active = sorted(range(n), key=lambda i: -measure[i])[:number]
        for i in range(n):
            last = i + 1 if causal else n
            if i in active:
                weights = torch.softmax(k[0, h, :last] @ q[0, h, i] / math.sqrt(D), dim=0)
            else:
                total = causal and spec.causal_context != "mean"
                weights = torch.ones(last).double() / (1 if total else last)
            mixed[0, h, i] = weights @ v[0, h, :last]
    return written(layer, mixed)


LINFORMER = {"projected_length": K, "max_length": N}
CLUSTERED = {"type": "clustered_attention", "num_clusters": 3}
LOW_RANK = {"low_rank": 2, "band_width": 1}

# fmt: off
REFERENCES = {
    **rows("linformer", linformer, "linformer", {
        **{how: ({**LINFORMER, "sharing": how},) for how in ("none", "headwise", "key_value")},
        "layerwise": ({**LINFORMER, "sharing": "layerwise"}, {"cross": False}),
        **{how: ({**LINFORMER, "projection": how},) for how in ("mean", "max")},
        **{f"conv {how}": ({**LINFORMER, "projection": "conv", "sharing": how},)
           for how in ("none", "headwise", "key_value")},
        "conv layerwise": ({**LINFORMER, "projection": "conv", "sharing": "layerwise"}, {"cross": False}),
    }, causal=ENCODER, cross=True, chain=True, layers=2, fields=GROUPED),
    **rows("nystromformer", nystromformer, "nystromformer", {
        "conv": ({"num_landmarks": 3, "conv_kernel_size": 3},),
        "plain": ({"num_landmarks": 3, "conv_kernel_size": None},),
        "exact inverse": ({"num_landmarks": 2, "conv_kernel_size": None, "pinv_iterations": None},),
        "many landmarks": ({"num_landmarks": 4, "pinv_iterations": 12, "conv_kernel_size": 5},),
    }, causal=ENCODER, fields=GROUPED, tolerance=1e-8),
    **rows("csalr", csalr, "csalr", {
        "": ({"num_landmarks": 3}, {"fields": GROUPED}),
        "ridge": ({"num_landmarks": 4, "ridge": 0.5}, {"rounds": False}),
        "renormalized": ({"num_landmarks": 3, "renormalize": True},),
    }, causal=ENCODER),
    **rows("set_transformer", set_transformer, "set_transformer", {
        "": ({"num_inducing": 3},),
        "bare": ({"num_inducing": 3, "inducing_norm": False},),
    }, causal=ENCODER),
    "clustered": Reference(CLUSTERED, clustered, ENCODER, fields=GROUPED, rounds=False),
    "clustered improved": Reference(
        {**CLUSTERED, "type": "improved_clustered_attention", "topk": 2}, clustered, ENCODER, rounds=False,
    ),
    **rows("memory_compressed", memory_compressed, "memory_compressed_attention", {
        "conv": ({"layer_pattern": "M"}, {"fields": GROUPED}),
        "mean": ({"layer_pattern": "M", "compress": "mean", "compression_factor": 2},),
        "max": ({"layer_pattern": "M", "compress": "max", "compress_activation": "silu", "first_slot": "null",
                 "bias": False},),
        "tokens": ({"layer_pattern": "M", "compression_factor": 1},),
    }, cross=True),
    "memory_compressed local": Reference(
        {"type": "memory_compressed_attention", "layer_pattern": "L", "block_size": 3}, local_blocks,
    ),
    **rows("low_rank_band", low_rank_band, "low_rank_band", {
        "sum": ({**LOW_RANK, "combine": "sum"}, {"cross": True, "fields": {}}),
        **{how: ({**LOW_RANK, "combine": how},) for how in ("mean", "gate", "concat")},
    }, fields=GROUPED),
    **rows("sinkhorn", sinkhorn, "sinkhorn_transformer", {
        "plain": ({"block_size": 4},),
        "short": ({"block_size": 2, "iterations": 3, "temperature": 0.2},),
        "one block": ({"block_size": 16},),
        "sortcut": ({"block_size": 2, "sortcut_blocks": 2}, {"causal": ENCODER}),
    }, fields=GROUPED, strong=0.6, tolerance=1e-8, weights=False),
    **rows("informer", informer, "informer", {
        "plain": ({"sampling_factor": 1}, {"causal": ENCODER}),
        "grouped": ({"sampling_factor": 1}, {"causal": ENCODER, "fields": {**GROUPED, "use_cache": False}}),
        "sum": ({"sampling_factor": 1, "causal_form": "paper"}, {"causal": DECODER}),
        "mean": ({"sampling_factor": 1, "causal_form": "paper", "causal_context": "mean"}, {"causal": DECODER}),
    }, fields={"use_cache": False}, cached=False, weights=False, rounds=False),
}
# fmt: on
