"""Literal equations of attention over fixed patterns: their sets of keys as loops over the definitions."""

import functools
import math

import torch

from hf_xformers.ops.block_sparse.pattern_atoms import RandomBlocks
from hf_xformers.position.t5_relative_bias import relative_buckets
from tests.attention.references.table import (
    ENCODER,
    GROUPED,
    RMS,
    Reference,
    heads_of,
    rows,
    softmax_attention,
    visible,
    written,
)
from tests.attention.score_helpers import GEOMETRY, HEADS, softmax_by_rows, split_heads


def patterned(encoder, decoder=None):
    """The equation over the keys j that token i of n reads, `encoder(i, j, head, n)`; in a decoder those of
    `decoder`, or the same, that are not later ones."""

    def equation(layer, x, memory=None, causal=False, bias=0.0):
        reads, n = decoder if causal and decoder else encoder, x.shape[1]
        reads = reads if not hasattr(reads, "of_layer") else reads.of_layer(layer)
        pairs = [[[reads(i, j, h, n) for j in range(n)] for i in range(n)] for h in range(HEADS)]
        return softmax_attention(layer, x, allowed=torch.tensor(pairs) & visible(n, n, causal), bias=bias)

    return equation


def by_layer(of_layer):
    """Sets of keys that are asked of a layer first."""

    def reads(*_):
        raise NotImplementedError

    reads.of_layer = of_layer
    return reads


def drawn_blocks(layer, count):
    """[head][block] -> the random blocks of a text of so many, as the layer's own table has them."""
    atom = next(part for part in layer.pattern.children() if isinstance(part, RandomBlocks))
    atom = atom.bind(count * layer.spec.block_size)
    return [torch.stack(atom.for_head(head).drawn(torch.arange(count)), 1).tolist() for head in range(HEADS)]


def random_blocks(layer):
    size, tables = layer.spec.block_size, functools.cache(lambda count: drawn_blocks(layer, count))
    return lambda i, j, h, n: i // size == j // size or j // size in tables(-(-n // size))[h][i // size]


def bigbird_blocks(layer):
    """Window, first and last blocks, and drawn ones, which are a text's own, whatever it is padded to."""
    spec = layer.spec
    size, side, ends = spec.block_size, spec.window_blocks // 2, spec.num_global_blocks
    tables = functools.cache(lambda count: drawn_blocks(layer, count) if spec.num_random_blocks else None)

    def reads(i, j, h, n):
        last, own, other = -(-n // size) - 1, i // size, j // size
        globals_ = [*range(ends), *range(last - ends + 1, last + 1)]
        drawn = tables(last + 1)
        return (
            own in globals_ or other in globals_ or abs(own - other) <= side
            or (drawn is not None and other in drawn[h][own])
        )  # fmt: skip

    return reads


def gap_of(layer):
    """The paces of heads: of a layer a number for all of them, or one for each."""
    gaps = layer.spec.attention_dilation if layer.spec.type == "longformer" else layer.spec.dilation
    gaps = gaps[layer.layer_idx] if isinstance(gaps, tuple) else gaps
    return gaps if isinstance(gaps, tuple) else (gaps,) * HEADS


def dilated(layer):
    gaps = gap_of(layer)
    return lambda i, j, h, n: j in [i + gaps[h] * t for t in (-2, -1, 0, 1, 2)]


def dilated_before(count):
    """In a decoder: so many of the tokens before."""

    def of_layer(layer):
        gaps = gap_of(layer)
        return lambda i, j, h, n: j in [i - gaps[h] * t for t in range(count)]

    return by_layer(of_layer)


STRIDE = 5


def strided(i, j):
    return abs(i - j) < STRIDE, (i - j) % STRIDE == 0


def fixed(i, j, head, verts=1):
    turn, own = head % verts, i // STRIDE == j // STRIDE
    columns = range(STRIDE - (turn + 1) * 2, STRIDE - turn * 2)
    return own, own or j % STRIDE in columns


def diet(layer):
    """The distances i - j that a layer reads."""
    spec, number = layer.spec, layer.layer_idx
    if spec.diet_type == "full":
        read = set(range(40))
    elif spec.diet_type == "cascade":
        read = set(range(spec.first_window_size * spec.window_size_multiplier**number))
    else:
        layers = range(number + 1) if spec.diet_type == "dilated_mem" else [number]
        read = {t * spec.d_base**at for at in layers for t in range(spec.kernel_size)}
    return lambda i, j, h, n: abs(i - j) in read


def scales(longest):
    """Parts of the text; in a decoder of the longest one."""
    radius = lambda n, head: (0, 1, math.ceil(n / 8), math.ceil(n / 4))[head]  # noqa: E731
    return lambda i, j, h, n: abs(i - j) <= radius(longest or n, h)


def line(ahead):
    """The Image Transformer's 1-D blocks of 5 with three tokens before them, and as many behind in an encoder."""
    return lambda i, j, h, n: i // 5 * 5 - 3 <= j < i // 5 * 5 + 5 + ahead


PLANE_WALK = [
    (top + down, left + right) for top in (0, 2) for left in (0, 2, 4) for down in (0, 1) for right in (0, 1)
]  # row and column of a place in the order of blocks, by walking through the plane


def near_in_plane(i, j, *_):
    """Whether j lies in the 2 x 2 block of i or in the flange of two around it."""
    (row, column), (other, beside) = PLANE_WALK[i], PLANE_WALK[j]
    top, left = row // 2 * 2, column // 2 * 2
    return top - 2 <= other < top + 4 and left - 2 <= beside < left + 4


def axial(layer):
    def same_row(i, j):
        return i // 4 == j // 4

    def same_column(i, j):
        return i % 4 == j % 4

    if layer.spec.sum_axial:
        return lambda i, j, h, n: same_row(i, j) if h < HEADS // 2 else same_column(i, j)
    return lambda i, j, h, n: (same_column if layer.layer_idx % 2 else same_row)(i, j)


def pooling_weights(layer, window, head, name):
    """Of the tokens [n, d] of a window, counted from its first; the middle one may be beyond the text."""
    if layer.spec.pool_type == "mean":
        return torch.full((len(window),), 1 / len(window), dtype=torch.float64)
    table = {"k": layer.key_pool, "v": layer.value_pool}[name]
    middle = (layer.spec.pool_kernel - 1) // 2
    centre = window[middle] if middle < len(window) else torch.zeros_like(window[0])
    return torch.softmax((table[head] @ centre)[: len(window)], 0)


def poolingformer(layer, x, memory=None, causal=False):
    """Two levels, token by token."""
    s, n, scale = layer.spec, x.shape[1], layer.head_dim**-0.5

    def heads(x, name):
        found = split_heads(getattr(layer, f"{name}_proj")(x), layer.head_dim)
        return found.repeat_interleave(HEADS // found.shape[1], 1)

    order = torch.arange(n)
    near = visible(n, n, causal) & ((order[:, None] - order).abs() <= s.window1)
    q, k, v = (heads(x, name) for name in "qkv")
    y = (softmax_by_rows(q @ k.mT * scale, near) @ v).transpose(1, 2).flatten(2)
    given = x if s.level2_input == "hidden" else y
    q, k, v = (heads(given, name if s.share_projections else f"{name}_pool") for name in "qkv")
    z = torch.zeros_like(q)
    for head in range(HEADS):
        for i in range(n):
            group, pooled = i // s.pool_stride, []
            for p in range(-(-n // s.pool_stride)):
                window = list(range(p * s.pool_stride, p * s.pool_stride + s.pool_kernel))
                # In a decoder all tokens of a window stand before, or at, the first token of the query's group.
                late = causal and window[-1] > group * s.pool_stride
                if abs(p - group) > s.window2 // s.pool_stride or late:
                    continue
                made = []
                for tensor, name in ((k, "k"), (v, "v")):
                    inside = tensor[0, head, [t for t in window if t < n]]
                    if s.pool_type == "max":
                        made.append(inside.amax(0))
                    else:
                        made.append(pooling_weights(layer, inside, head // layer.num_key_value_groups, name) @ inside)
                pooled.append(made)
            if pooled:
                keys, values = (torch.stack(each) for each in zip(*pooled, strict=True))
                z[0, head, i] = torch.softmax(keys @ q[0, head, i] * scale, 0) @ values
    return layer.o_proj(y + z.transpose(1, 2).flatten(2))


def transient_global(layers, x, memory=None, causal=False):
    """A window and summaries of blocks, with a bias by distance of blocks that all layers share."""
    table, outputs = layers[0].block_bias.weight, []
    for layer in layers:
        s, n, width = layer.spec, x.shape[1], layer.head_dim
        count = n // s.block_size
        block = [min(i // s.block_size, count - 1) for i in range(n)]
        sums = [x[0, [i for i in range(n) if block[i] == b]].sum(0) for b in range(count)]
        sides = layer.summary_norm(torch.stack(sums))[None] if count else x[:, :0]
        q, k, v = heads_of(layer, x)
        side_k, side_v = (
            proj(sides).unflatten(-1, (layer.num_key_value_heads, width)).transpose(1, 2)
            for proj in (layer.k_proj, layer.v_proj)
        )
        side_k, side_v = (t.repeat_interleave(layer.num_key_value_groups, 1) for t in (side_k, side_v))
        mixed = torch.zeros_like(q)
        for head in range(HEADS):
            for i in range(n):
                near = [j for j in range(n) if abs(i - j) <= s.window_size]
                scores = [q[0, head, i] @ k[0, head, j] * layer.scaling for j in near]
                for b in range(count):
                    bucket = relative_buckets(
                        torch.tensor(b - block[i]), bidirectional=True, num_buckets=4, max_distance=3
                    )
                    scores.append(q[0, head, i] @ side_k[0, head, b] * layer.scaling + table[bucket, head])
                values = torch.cat([v[0, head, near], side_v[0, head]])
                mixed[0, head, i] = torch.softmax(torch.stack(scores), 0) @ values
        outputs.append(written(layer, mixed))
        x = x + outputs[-1]
    return outputs


def sparse(settings, reads, layer_idx=1, **more):
    spec = {"type": "sparse_transformer", "stride": STRIDE, "summary_width": 2, **settings}
    return Reference(spec, patterned(reads), layers=2, layer_idx=layer_idx, **more)


def windowed(spec, encoder, decoder=None, **more):
    return Reference(spec, patterned(encoder, decoder), layers=2, layer_idx=1, **more)


BAND = {"type": "band_attention", "window_size": 3}
GLOBAL = {"type": "global_attention", "window_size": 2, "num_global_tokens": 2}
GAPS = {"type": "dilated_attention", "window_size": 2, "dilation": (1, (1, 1, 2, 4), 2)}
RANDOM = {"type": "random_attention", "block_size": 2, "num_random_blocks": 2, "random_seed": 3}
BIGBIRD = {"block_size": 2, "num_random_blocks": 2}
LONGFORMER = {"type": "longformer", "attention_window": 4, "attention_dilation": (1, (1, 1, 2, 3), 1)}
SCALES = {"type": "multi_scale_transformer", "scales": (0, 1, 0.125, 0.25), "heads_per_scale": ((1, 1, 1, 1),)}
PLANE = {"type": "image_transformer", "image_size": (4, 3), "num_channels": 2}  # 4 rows of 6 tokens, as many as 24
POOLING = {"window1": 2, "window2": 7, "pool_kernel": 3, "pool_stride": 2, "two_level_layers": (0,)}
MIX = {"level2_input": "hidden", "share_projections": True, "pool_kernel": 5, "pool_stride": 3, "window2": 8}
TRANSIENT = {"window_size": 2, "block_size": 3, "num_buckets": 4, "max_distance": 3}
ONE_LAYER = {"num_hidden_layers": 1}

# fmt: off
REFERENCES = {
    "band": windowed(BAND, lambda i, j, h, n: abs(i - j) <= 3, lambda i, j, h, n: i - j < 3, bias=True),
    "global": windowed(
        GLOBAL, lambda i, j, h, n: abs(i - j) <= 2 or i < 2 or j < 2, lambda i, j, h, n: i - j < 2 or j < 2, bias=True,
    ),
    "dilated": windowed(GAPS, by_layer(dilated), dilated_before(2), fields=GROUPED),
    "dilated evenly": windowed({**GAPS, "dilation": 3}, by_layer(dilated), dilated_before(2)),
    "dilated strided": windowed(
        {"type": "dilated_attention", "dilation": 4, "strided": True}, lambda i, j, h, n: (i - j) % 4 == 0,
    ),
    "random": windowed(RANDOM, by_layer(random_blocks)),
    "local": windowed({"type": "block_local_attention", "block_size": 4}, lambda i, j, h, n: i // 4 == j // 4),
    "local near": windowed(
        {"type": "block_local_attention", "block_size": 3, "blocks_before": 1},
        lambda i, j, h, n: 0 <= i // 3 - j // 3 <= 1, bias=True,
    ),
    **rows("bigbird", patterned(by_layer(bigbird_blocks)), "bigbird", {
        "": (BIGBIRD,),
        "ends": ({**BIGBIRD, "window_blocks": 1, "num_global_blocks": 2},),
        "window": ({**BIGBIRD, "num_random_blocks": 0, "window_blocks": 5},),
    }, causal=ENCODER, layers=2, layer_idx=1),
    "longformer": windowed(LONGFORMER, by_layer(dilated), dilated_before(3)),
    "sparse strided": sparse({"kind": "strided"}, lambda i, j, h, n: any(strided(i, j))),
    "sparse strided heads": sparse(
        {"kind": "strided", "factorization": "heads"}, lambda i, j, h, n: strided(i, j)[h % 2], fields=GROUPED,
    ),
    "sparse strided layers": sparse(
        {"kind": "strided", "factorization": "layers"}, lambda i, j, h, n: strided(i, j)[1],
    ),
    "sparse strided even": sparse(
        {"kind": "strided", "factorization": "layers"}, lambda i, j, h, n: strided(i, j)[0], layer_idx=0,
    ),
    "sparse fixed": sparse({}, lambda i, j, h, n: any(fixed(i, j, h))),
    "sparse fixed verts": sparse({"num_verts": 2}, lambda i, j, h, n: any(fixed(i, j, h, 2))),
    "sparse fixed heads": sparse(
        {"factorization": "heads", "num_verts": 2}, lambda i, j, h, n: fixed(i, j, h // 2, 2)[h % 2],
    ),
    "sparse fixed layers": sparse({"factorization": "layers"}, lambda i, j, h, n: fixed(i, j, h)[1]),
    **rows("diet", patterned(by_layer(diet)), "transformer_on_a_diet", {
        "full 0": ({"diet_type": "full"}, {"layer_idx": 0}),
        "dilated 1": ({"diet_type": "dilated"}, {"layer_idx": 1}),
        "dilated 2": ({"diet_type": "dilated", "kernel_size": 4, "d_base": 3}, {"layer_idx": 2}),
        "cascade 0": ({"diet_type": "cascade"}, {"layer_idx": 0}),
        "dilated_mem 2": ({"diet_type": "dilated_mem"}, {"layer_idx": 2}),
        "dilated_mem 1": ({"diet_type": "dilated_mem", "kernel_size": 2, "d_base": 1}, {"layer_idx": 1}),
        "cascade 1": (
            {"diet_type": "cascade", "first_window_size": 2, "window_size_multiplier": 3}, {"layer_idx": 1},
        ),
    }, layers=3),
    "multi_scale": Reference(
        SCALES, patterned(scales(None), scales(GEOMETRY["max_position_embeddings"])), fields=ONE_LAYER,
    ),
    "image line": Reference({**PLANE, "block_length": 5, "memory_length": 3}, patterned(line(3), line(0))),
    "image plane": Reference(
        {**PLANE, "local": "2d", "block_shape": (2, 2), "memory_flange": (2, 2)}, patterned(near_in_plane),
    ),
    **rows("axial", patterned(by_layer(axial)), "axial_transformer", {
        "rows": ({"columns": 4, "sum_axial": False},),
        "columns": ({"columns": 4, "sum_axial": False}, {"layer_idx": 1}),
        "sum": ({"columns": 4, "sum_axial": True},),
    }, causal=ENCODER, layers=2),
    **rows("poolingformer", poolingformer, "poolingformer", {
        "ldconv": (POOLING,),
        "mean": ({**POOLING, "pool_type": "mean", "pool_kernel": 2, "pool_stride": 1},),
        "max": ({**POOLING, "pool_type": "max", "pool_kernel": 3, "pool_stride": 3},),
        "mix": ({**POOLING, **MIX},),
    }, weights=False, fields={**GROUPED, **ONE_LAYER}),
    **rows("transient_global", transient_global, "transient_global", {
        "": (TRANSIENT,),
        "grouped": (TRANSIENT, {"fields": {**GROUPED, **RMS}}),
    }, causal=ENCODER, chain=True, layers=2, weights=False),
}
# fmt: on
