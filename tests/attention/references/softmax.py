"""Literal equations of attention over all pairs: dense and its options, scores that layers pass on, mixed heads."""

import math

import torch

from tests.attention.references.table import (
    BLOCKS,
    ENCODER,
    GROUPED,
    RMS,
    WIDE,
    Reference,
    heads_of,
    rows,
    visible,
    written,
)
from tests.attention.score_helpers import HEADS, softmax_by_rows, split_heads


def dense(layer, x, memory=None, causal=False, bias=None, turn=None, near=lambda i, j: True):
    """One query of one head at a time, with what all softmax attention may have: norms of queries and keys, a cap on
    scores, a learned sink, gates on what heads have read. near(i, j): whether i may read j, beside the order."""
    spec, width, groups, read = layer.spec, layer.head_dim, layer.num_key_value_groups, x if memory is None else memory
    q, k, v = layer.q_proj(x)[0], layer.k_proj(read)[0], layer.v_proj(read)[0]

    def normed(rows, name):
        if spec.query_key_norm == "none":
            return rows
        single = spec.query_key_norm != "projection"
        if single:
            rows = rows.unflatten(-1, (-1, width))
        rows = rows / (rows.square().mean(-1, keepdim=True) + layer.config.layer_norm_eps).sqrt()
        rows = rows * getattr(layer, name).weight
        return rows.flatten(-2) if single else rows

    q, k = normed(q, "q_norm"), normed(k, "k_norm")
    if turn is not None:
        q, k = (turn(split_heads(rows[None], width)).transpose(1, 2).flatten(2)[0] for rows in (q, k))
    scale = spec.scale if spec.scale is not None else 1 / math.sqrt(width)
    gates = None if layer.gate_proj is None else 1 / (1 + torch.exp(-layer.gate_proj(x)[0]))
    mixed = torch.zeros(1, len(q), layer.num_heads * width, dtype=torch.float64)
    weights = torch.zeros(1, layer.num_heads, len(q), len(k), dtype=torch.float64)
    for h in range(layer.num_heads):
        own, shared = slice(h * width, (h + 1) * width), slice(h // groups * width, (h // groups + 1) * width)
        for i in range(len(q)):
            seen = [j for j in range(len(k)) if near(i, j) and (j <= i or not causal)]
            scores = [scale * float(q[i, own] @ k[j, shared]) for j in seen]
            if spec.score_cap is not None:
                scores = [spec.score_cap * math.tanh(score / spec.score_cap) for score in scores]
            if bias is not None:
                scores = [score + float(bias[h, i, j]) for score, j in zip(scores, seen)]
            powers = [math.exp(score) for score in scores]
            total = sum(powers) + (0.0 if layer.sinks is None else math.exp(float(layer.sinks[h])))
            for power, j in zip(powers, seen):
                weights[0, h, i, j] = power / total
                mixed[0, i, own] += power / total * v[j, shared]
            if gates is not None:  # one number for each head, or one for each element
                mixed[0, i, own] *= gates[i].view(layer.num_heads, -1)[h]
    return layer.o_proj(mixed), weights


def window(reach, first=0):
    """Within `reach` on either side, in a decoder the last `reach`; the first tokens are in sight of all."""

    def equation(layer, x, memory=None, causal=False, **more):
        near = (lambda i, j: i - j < reach or j < first) if causal else (lambda i, j: abs(i - j) <= reach or j < first)
        return dense(layer, x, None, causal, near=near, **more)

    return equation


def adaptively_sparse(layer, x, memory=None, causal=False, bias=0.0):
    """Row by row, by bisection for tau in sum_j [(alpha - 1) s_j - tau]_+^(1 / (alpha - 1)) = 1."""
    q, k, v = heads_of(layer, x, memory)
    scores, spec = q @ k.mT / layer.head_dim**0.5 + bias, layer.spec
    alpha = [spec.alpha] if spec.alpha else (1 + torch.sigmoid(layer.shape)).clamp(min=spec.alpha_min).tolist()
    weights = torch.zeros_like(scores)
    for h in range(HEADS):
        for i in range(scores.shape[2]):
            a, row = float(alpha[h % len(alpha)]), scores[0, h, i, : i + 1 if causal else None]
            if a == 1:
                weights[0, h, i, : len(row)] = torch.softmax(row, -1)
                continue
            low, high = float((a - 1) * row.max()) - 1, float((a - 1) * row.max())
            for _ in range(70):
                middle = (low + high) / 2
                total = sum(max((a - 1) * s - middle, 0.0) ** (1 / (a - 1)) for s in row.tolist())
                low, high = (middle, high) if total >= 1 else (low, middle)
            shares = [max((a - 1) * s - low, 0.0) ** (1 / (a - 1)) for s in row.tolist()]
            weights[0, h, i, : len(row)] = torch.tensor(shares, dtype=torch.float64)
    return written(layer, weights @ v), weights


def adaptive_span(layer, x, memory=None, causal=False, bias=None, relative=None):
    """m(x) e^s over its sum, one pair of tokens at a time. relative: the table of the first layer, if of another."""
    spec, d, groups, n = layer.spec, layer.head_dim, layer.num_key_value_groups, x.shape[1]
    gap, longest = 0 if spec.include_self else 1, layer.max_span
    relative = layer.relative_keys if relative is None else relative
    q, k, v = (split_heads(part(x), d)[0] for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    z = layer.spans(x)
    z = z[0] if spec.dynamic else z[:, None].expand(-1, n)
    weights = torch.zeros(1, HEADS, n, n, dtype=torch.float64)
    for h in range(HEADS):
        for i in range(n):
            powers = torch.zeros(n, dtype=torch.float64)
            for j in range(n):
                far = (i - j if causal else abs(i - j)) - gap
                if far < 0 or far >= longest:
                    continue
                m = min(max((spec.ramp + float(z[h, i]) - far) / spec.ramp, 0.0), 1.0)
                key = k[h // groups, j]
                if relative is not None:
                    key = key + relative[far if causal else i - j + longest - 1 + gap]
                score = float(q[h, i] @ key) / math.sqrt(d) + (0.0 if bias is None else float(bias[h, i, j]))
                powers[j] = m * math.exp(score)
            if powers.sum() > 0:
                weights[0, h, i] = powers / powers.sum()
    return written(layer, weights @ v.repeat_interleave(groups, 0)), weights


def spans(layer):
    """z in tokens for each head, short ones and one that is longer than most texts."""
    layer.span.copy_(torch.tensor([0.0, 1.7, 2.0, 7.3], dtype=torch.float64) / layer.max_span)


def collaborative(layer, x, memory=None, causal=False, bias=0.0):
    """Eq. 6 with its content term, one head at a time."""
    read, scores = x if memory is None else memory, []
    for head in range(HEADS):
        product = layer.q_proj(x) @ torch.diag(layer.mixing[head]) @ layer.k_proj(read).mT
        if layer.content_proj is not None:
            product = product + layer.content_proj(read)[:, None, :, head]
        scores.append(product * layer.scaling)
    allowed = visible(x.shape[1], read.shape[1], causal)
    weights = softmax_by_rows(torch.stack(scores, 1) + bias, allowed)
    return written(layer, weights @ split_heads(layer.v_proj(read), layer.head_dim)), weights


def mixing_matrix(layer, static, dynamic, queries, keys, sizes):
    """P[b, i, j, from, to] in full."""
    matrix = torch.eye(*sizes, dtype=torch.float64) if static is None else static
    matrix = matrix.expand(queries.shape[0], queries.shape[1], keys.shape[1], *sizes)
    for name in dynamic:
        if name in layer.dynamic:
            tokens = queries if name[0] == "x" else keys
            own = layer.dynamic[name](tokens).view(*tokens.shape[:2], *sizes)
            matrix = matrix + (own[:, :, None] if name[0] == "x" else own[:, None])
    return matrix


def talking_heads(layer, x, memory=None, causal=False, bias=0.0):
    """Every mixing matrix of every pair of tokens, applied as it stands."""
    read = x if memory is None else memory
    q = split_heads(layer.q_proj(x), layer.head_dim)
    k, v = (split_heads(part(read), layer.head_dim) for part in (layer.k_proj, layer.v_proj))
    scores = torch.einsum("bkid,bkjd->bkij", q, k) / layer.head_dim**0.5
    first = mixing_matrix(layer, layer.score_mixing, ("x2l", "m2l"), x, read, (q.shape[1], HEADS))
    logits = torch.einsum("bkij,bijkh->bhij", scores, first) + bias
    weights = softmax_by_rows(logits, visible(x.shape[1], read.shape[1], causal))
    second = mixing_matrix(layer, layer.weight_mixing, ("x2w", "m2w"), x, read, (HEADS, v.shape[1]))
    mixed = torch.einsum("bhij,bijhv->bvij", weights, second)
    return written(layer, torch.einsum("bvij,bvjd->bvid", mixed, v)), weights


def realformer(layers, x, memory=None, causal=False, bias=0.0):
    """Scores summed over layers as they are, masked in each layer on their own."""
    total, outputs = 0.0, []
    for number, layer in enumerate(layers):
        q, k, v = heads_of(layer, x, memory)
        total = total + q @ k.mT / layer.head_dim**0.5
        logits = (total / (number + 1) if layer.spec.mean else total) + bias
        weights = softmax_by_rows(logits, visible(q.shape[2], k.shape[2], causal))
        outputs.append((written(layer, weights @ v), weights))
        x = x + outputs[-1][0]
    return outputs


def lazyformer(layers, x, memory=None, causal=False, bias=0.0):
    """Layers that have queries make a map, the others use the last one."""
    outputs, weights = [], None
    for layer in layers:
        read = x if memory is None else memory
        if layer.q_proj is not None:
            q = split_heads(layer.q_proj(x), layer.head_dim)
            k = split_heads(layer.k_proj(read), layer.head_dim).repeat_interleave(layer.num_key_value_groups, 1)
            scores = q @ k.mT / layer.head_dim**0.5 + bias
            weights = softmax_by_rows(scores, visible(x.shape[1], read.shape[1], causal))
        v = split_heads(layer.v_proj(read), layer.head_dim).repeat_interleave(layer.num_key_value_groups, 1)
        outputs.append((written(layer, weights @ v), weights))
        x = x + outputs[-1][0]
    return outputs


def shifted_sum(conv, image, in_order):
    """The convolution, a number of the kernel at a time; zeros around the image."""
    weight, size = conv.conv.weight, conv.conv.weight.shape[-1]
    (rows, columns), half = image.shape[2:], size // 2
    wide = torch.nn.functional.pad(image, (half, half, size, size))
    top = size - (size - 1 if in_order else half)
    total = conv.conv.bias[:, None, None] + torch.zeros_like(image)
    for a in range(size):
        for b in range(size):
            part = wide[:, :, top + a : top + a + rows, b : b + columns]
            total = total + torch.einsum("oc,bcij->boij", weight[:, :, a, b], part)
    return total


def predictive(layers, x, memory=None, causal=False):
    """The image of scores, convolved; of earlier rows alone in a decoder, whatever it reads."""
    before, outputs, spec = None, [], layers[0].spec
    in_order = causal or memory is not None
    for layer in layers:
        q, k, v = heads_of(layer, x, memory)
        allowed = visible(q.shape[2], k.shape[2], causal)
        scores = q @ k.mT / layer.head_dim**0.5
        if before is not None:
            image = before if spec.form == "pat" else (1 - spec.beta) * scores + spec.beta * before
            found = shifted_sum(layer.score_conv, torch.where(allowed, image, 0.0), in_order)
            if spec.function != "none":
                found = torch.where(found > 0, found, (0.01 if spec.function == "leaky_relu" else 0.0) * found)
            own, share = (scores, 1 - spec.alpha) if spec.form == "pat" else (image, spec.alpha)
            scores = (1 - share) * own + share * found
        before, weights = scores, softmax_by_rows(scores, allowed)
        outputs.append((written(layer, weights @ v), weights))
        x = x + outputs[-1][0]
    return outputs


def localness(layer, x, memory=None, causal=False):
    """Centres and widths of windows, one head and query at a time."""
    q, k, v = (y[0] for y in heads_of(layer, x, memory))
    weights = torch.zeros(1, HEADS, x.shape[1], k.shape[1], dtype=torch.float64)
    for (h, i), (centre, width, seen) in localness_windows(layer, x, memory, causal).items():
        std = max(width / 2, 0.5)
        scores = q[h, i] @ k[h, :seen].T / math.sqrt(layer.head_dim)
        away = torch.arange(1, seen + 1).double() - centre
        weights[0, h, i, :seen] = torch.softmax(scores - away**2 / (2 * std**2), -1)
    return written(layer, weights @ v), weights


def localness_windows(layer, x, memory=None, causal=False):
    """P, D and the number of keys by head and query."""
    q, k, _ = (y[0] for y in heads_of(layer, x, memory))
    found = {}
    for h in range(HEADS):
        one = h % len(layer.predictor)
        for i in range(x.shape[1]):
            seen = i + 1 if causal else k.shape[1]
            hidden = torch.tanh(q[h, i] @ layer.predictor[one])
            if layer.spec.window == "query":
                width = seen * torch.sigmoid(hidden @ layer.width[h]).item()
            elif layer.spec.window == "layer":
                mean = torch.tanh(k[h].mean(0) @ layer.width_predictor[one])
                width = seen * torch.sigmoid(mean @ layer.width[h]).item()
            else:
                width = layer.spec.fixed_window
            found[h, i] = seen * torch.sigmoid(hidden @ layer.centre[h]).item(), width, seen
    return found


def hard_coded_gaussian(layer, x, memory=None, causal=False):
    """The sum over all tokens of the text, one query and one head at a time."""
    spec, read = layer.spec, x if memory is None else memory
    offsets = spec.offsets or ((-1, 0) if causal else (-1, 1) if memory is None else (-1, 0, 1))
    value = split_heads(layer.v_proj(read), layer.head_dim).repeat_interleave(layer.num_key_value_groups, 1)
    ratio = 1.0 if memory is None else spec.ratio
    weights = torch.zeros(1, HEADS, x.shape[1], read.shape[1], dtype=torch.float64)
    for h in range(HEADS):
        for i in range(x.shape[1]):
            centre = ratio * i + offsets[h % len(offsets)]
            squares = [(j - centre) ** 2 for j in range(i + 1 if causal else read.shape[1])]
            nearest = min(squares) if spec.renormalize else 0.0  # a factor that the sum takes out again
            powers = [
                math.exp(-(square - nearest) / (2 * spec.std**2)) / (spec.std * math.sqrt(2 * math.pi))
                for square in squares
            ]
            total = sum(powers) if spec.renormalize else 1.0
            weights[0, h, i, : len(powers)] = torch.tensor(powers, dtype=torch.float64) / total
    return written(layer, weights @ value), weights


def synthesizer_scores(layer, member, tokens):
    """B [H, T, L] of one row of tokens [T, D], or [H, T, T] of dot, by the definition."""
    heads, d, length = layer.num_heads, layer.head_dim, tokens.shape[0]
    own = torch.arange(heads) if not layer.spec.share_heads else torch.zeros(heads, dtype=torch.long)
    result = torch.zeros(heads, length, layer.length, dtype=torch.float64)
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        for i in range(length):
            if member == "dense":
                hidden = layer.hidden_proj.weight[part] @ tokens[i]
                hidden = hidden if layer.hidden_proj.bias is None else hidden + layer.hidden_proj.bias[part]
                result[h, i] = layer.dense_table[own[h]] @ hidden.clamp(min=0)
                if layer.dense_bias is not None:
                    result[h, i] += layer.dense_bias[own[h]]
            elif member == "random":
                result[h, i] = layer.random_table[own[h], i]
            elif member == "fixed_random":
                result[h, i] = layer.fixed_table[own[h], i]
            elif member == "factorized_random":
                for j in range(layer.length):
                    result[h, i, j] = layer.query_table[own[h], i] @ layer.key_table[own[h], j]
            elif member == "factorized_dense":
                a, b = (proj.out_features // heads for proj in (layer.row_proj, layer.column_proj))
                u, w = layer.row_proj(tokens[i]), layer.column_proj(tokens[i])
                for p in range(a):
                    for r in range(b):
                        result[h, i, p * b + r] = u[h * a + p] * w[h * b + r]
            else:
                q, k = layer.q_proj(tokens), layer.k_proj(tokens)
                group = slice(h // layer.num_key_value_groups * d, (h // layer.num_key_value_groups + 1) * d)
                result[h, i, :length] = k[:, group] @ q[i, part] / math.sqrt(d)
    return result[:, :, :length]


def synthesizer(layer, x, memory=None, causal=False, shares=None):
    """Sums of what each kind says of a place or a token. shares: by member, in place of the mixture's softmax."""
    if shares is None:
        mixture = torch.ones(len(layer.members)) if layer.mixture is None else torch.softmax(layer.mixture, 0)
        shares = dict(zip(layer.members, mixture.tolist()))
    logits = sum(shares[member] * synthesizer_scores(layer, member, x[0]) for member in layer.members)[None]
    weights = softmax_by_rows(logits, visible(x.shape[1], x.shape[1], causal))
    v = split_heads(layer.v_proj(x), layer.head_dim).repeat_interleave(layer.num_key_value_groups, 1)
    return written(layer, weights @ v), weights


def fixed_table(layer):
    if "fixed_random" in layer.spec.kind:
        torch.manual_seed(5)
        layer.fixed_table.normal_()


def sinusoid(distance, width):
    """R by its definition, one entry at a time."""
    rates = [10000.0 ** (-2 * i / width) for i in range(width // 2)]
    angles = torch.tensor([distance * rate for rate in rates], dtype=torch.float64)
    return torch.cat([torch.sin(angles), torch.cos(angles)])


def four_terms(layer, tokens, count, biases, clamp=None):
    """Scores [B, H, count, S] of the last `count` tokens, term by term and pair by pair."""
    width = layer.head_dim
    query = split_heads(layer.q_proj(tokens), width)[:, :, -count:]
    key = split_heads(layer.k_proj(tokens), width).repeat_interleave(layer.num_key_value_groups, 1)
    keys = key.shape[2]
    content_bias, position_bias = biases
    scores = torch.zeros(*query.shape[:3], keys, dtype=torch.float64)
    for i in range(count):
        for j in range(keys):
            distance = keys - count + i - j
            if clamp is not None:
                distance = max(min(distance, clamp), -clamp)
            relative = layer.r_proj(sinusoid(distance, tokens.shape[-1])).view(HEADS, width)
            for h in range(HEADS):
                q, k, r = query[:, h, i], key[:, h, j], relative[h]
                scores[:, h, i, j] = q @ r + (q * k).sum(-1) + k @ content_bias[h] + position_bias[h] @ r
    return scores / width**0.5


def transformer_xl(layers, x, memory=None, causal=False):
    """Each layer with its own pair of biases, or all with that of the first."""
    outputs = []
    for layer in layers:
        owner, spec, n = layers[0] if layer.content_bias is None else layer, layer.spec, x.shape[1]
        scores = four_terms(layer, x, n, (owner.content_bias, owner.position_bias), spec.clamp)
        allowed, place = visible(n, n, causal), torch.arange(n)
        if spec.reach is not None:
            allowed = allowed & ((place[:, None] - place).abs() <= spec.reach)
        weights = softmax_by_rows(scores, allowed)
        v = split_heads(layer.v_proj(x), layer.head_dim).repeat_interleave(layer.num_key_value_groups, 1)
        outputs.append((written(layer, weights @ v), weights))
        x = x + outputs[-1][0]
    return outputs


def all_attention(layer, x, memory=None, causal=False):
    """One query, one head at a time, over the text and the memory."""
    width, groups = layer.head_dim, layer.num_key_value_groups
    q, k, v = (split_heads(p(x), width)[0] for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    mixed, weights = torch.zeros_like(q)[None], torch.zeros(1, HEADS, x.shape[1], x.shape[1], dtype=torch.float64)
    for h in range(HEADS):
        g = h // groups
        for i in range(x.shape[1]):
            seen = i + 1 if causal else x.shape[1]
            keys = torch.cat([k[g, :seen], layer.memory_keys[g] * width**0.5])
            values = torch.cat([v[g, :seen], layer.memory_values[g] * layer.slots**0.5])
            shares = torch.softmax(keys @ q[h, i] / width**0.5, -1)
            mixed[0, h, i], weights[0, h, i, :seen] = shares @ values, shares[:seen]
    return written(layer, mixed), weights


SPAN = {"type": "adaptive_span", "max_span": 12, "ramp": 3}
SPAN_PATHS = ("eager", "span_blocks", "span_tiles")
KINDS = ("dense", "random", "fixed_random", "factorized_dense", "factorized_random")
MIXTURES = ("random+dot", "dot+factorized_dense+fixed_random+random", "dense+factorized_random+dot")
DYNAMIC = ("x2l", "m2l", "x2w", "m2w")
WINDOW = {"type": "sliding_window", "window_size": 3, "sinks": 1}
FIVE, PAT = {"num_hidden_layers": 5}, {"form": "pat", "alpha": 0.7}


def spanned(relative_keys=True, fields=None, causal=(False, True), **spec):
    return Reference(
        {**SPAN, "relative_keys": relative_keys, **spec}, adaptive_span, causal, fields=fields or {}, bias=True,
        paths=SPAN_PATHS, prepare=None if spec.get("dynamic") else spans,
    )  # fmt: skip


def under_itself(**settings):
    """What cross-attention of predicted scores needs: self-attention that keeps such scores, too."""
    return {"is_decoder": True, "attention": {"type": "predictive_attention", **settings}}


def synthesized(kind, fields=None, **spec):
    given = {"type": "synthesizer", "kind": kind, **spec}
    return Reference(given, synthesizer, fields=fields or {}, paths=BLOCKS, prepare=fixed_table)


# fmt: off
REFERENCES = {
    **rows("dense", dense, "dense", {
        "": ({}, {"cross": True, "bias": True, "turns": True}),
        "grouped": ({}, {"cross": True, "fields": GROUPED}),
        "multi-query": ({}, {"fields": {"num_key_value_heads": 1}}),
        "wide": ({}, {"fields": WIDE}),
        "scaled": ({"scale": 0.7, "bias": False},),
        "normed": ({"query_key_norm": "head", "score_cap": 2.0}, {"fields": RMS}),
        "normed whole": ({"query_key_norm": "projection", "output_bias": False}, {"fields": {**RMS, **GROUPED}}),
        "normed apart": ({"query_key_norm": "each_head"}, {"fields": {**RMS, **GROUPED}}),
        "capped": ({"score_cap": 0.5, "bias": False, "output_bias": True},),
        "sinks": ({"learned_sinks": True, "output_gate": "head"}, {"cross": True}),
        "gated": ({"output_gate": "element"}, {"fields": GROUPED}),
    }),
    **rows("band", window(3), "band_attention", {
        "sinks": ({"window_size": 3, "learned_sinks": True, "output_gate": "element"}, {"fields": GROUPED}),
        "capped": ({"window_size": 3, "score_cap": 0.5, "query_key_norm": "head"}, {"fields": {**RMS, **GROUPED}}),
    }),
    "sliding_window": Reference(WINDOW, window(3, 1), fields=GROUPED, turns=True),
    "sliding_window many": Reference({**WINDOW, "window_size": 1, "sinks": 5, "score_cap": 0.6}, window(1, 5)),
    "sliding_window sinks": Reference({**WINDOW, "learned_sinks": True, "output_gate": "head"}, window(3, 1)),
    "sliding_window none": Reference({**WINDOW, "sinks": 0}, window(3)),
    **rows("adaptively_sparse", adaptively_sparse, "adaptively_sparse", {
        "learned": ({}, {"cross": True}),
        "shared": ({"share_alpha": True},),
        "bounded": ({"alpha_min": 1.5},),
        "softmax": ({"alpha": 1},),
        "1.3": ({"alpha": 1.3},),
        "1.5": ({"alpha": 1.5},),
        "sparsemax": ({"alpha": 2},),
    }, bias=True, strong=0.8, fields=GROUPED, paths=("eager", "sdpa", "entmax_tiles")),
    "adaptive_span": spanned(),
    "adaptive_span itself": spanned(include_self=True),
    "adaptive_span engine": spanned(relative_keys=False, fields=GROUPED),
    "adaptive_span engine itself": spanned(relative_keys=False, include_self=True, max_span=3),
    "adaptive_span short": spanned(max_span=2, ramp=5, fields=GROUPED),
    "adaptive_span dynamic": spanned(dynamic=True, max_span=4),
    "adaptive_span dynamic engine": spanned(dynamic=True, relative_keys=False, include_self=True),
    **rows("collaborative", collaborative, "collaborative_attention", {
        "": ({}, {"cross": True, "bias": True}),
        "narrow": ({"shared_width": 6, "start": "ones", "bias": False},),
        "wide": ({"shared_width": 24, "content_bias": False},),
    }, paths=BLOCKS),
    **rows("talking_heads", talking_heads, "talking_heads", {
        "": ({}, {"cross": True}),
        "unequal": ({"num_key_heads": 3, "num_value_heads": 5}, {"cross": True, "bias": True}),
        "scores": ({"mix_weights": False, "bias": False},),
        "weights": ({"mix_scores": False},),
        "dynamic": ({"num_key_heads": 2, "num_value_heads": 3, "dynamic": DYNAMIC}, {"cross": True}),
        **{name: ({"dynamic": (name,)},) for name in DYNAMIC},
    }, paths=BLOCKS),
    **rows("realformer", realformer, "realformer", {
        "": ({}, {"cross": True, "bias": True}),
        "mean": ({"mean": True}, {"fields": {**GROUPED, **WIDE}}),
    }, chain=True, layers=3, paths=("eager", "sdpa", "realformer_projections")),
    **rows("lazyformer", lazyformer, "lazyformer", {
        "weights": ({"hand_on": "weights"},),
        "projections": ({"hand_on": "projections", "block_sizes": (1, 3, 1)}, {"fields": {**GROUPED, **FIVE}}),
        "auto": ({"hand_on": "auto", "block_size": 9},),
    }, cross=True, chain=True, layers=5, bias=True, strong=0.2, fields=FIVE),
    **rows("predictive", predictive, "predictive_attention", {
        "evolving": ({}, {"cross": under_itself()}),
        "pat": (PAT, {"cross": under_itself(**PAT)}),
        "single": ({"kernel": 1}, {"fields": WIDE}),
        "relu": ({"alpha": 0.2, "beta": 0.6, "kernel": 5, "activation": "relu"}, {"fields": GROUPED}),
    }, chain=True, layers=3),
    **rows("localness", localness, "localness", {
        "query": ({"layers": 1},),
        "fixed": ({"layers": 1, "window": "fixed", "fixed_window": 3}, {"fields": GROUPED}),
        "layer": ({"layers": 1, "window": "layer"}, {"fields": WIDE, "causal": ENCODER}),
        "own": ({"layers": 1, "share_heads": False},),
    }, cross=True, paths=BLOCKS),
    **rows("gaussian", hard_coded_gaussian, "hard_coded_gaussian", {
        "plain": ({"ratio": 1.5}, {"cross": True}),
        "renormalized": ({"renormalize": True, "std": 0.7}, {"steady": True}),
        "offsets": ({"offsets": (0, 3, -2, 1), "std": 0.5}, {"cross": True, "steady": True}),
        "ahead": ({"offsets": (2,), "std": 2.0}, {"fields": GROUPED, "causal": ENCODER}),
        "wide": ({"std": 1.5}, {"fields": WIDE}),
    }),
    **{f"synthesizer {kind}": synthesized(kind) for kind in KINDS + MIXTURES},
    "synthesizer shared": synthesized("factorized_random+random+dot", share_heads=True, fields=GROUPED),
    "synthesizer wide": synthesized("dense", bias=False, fields={"head_dim": 5}),
    "synthesizer long": synthesized("random", max_length=15),
    **rows("transformer_xl", transformer_xl, "transformer_xl", {
        "": ({}, {"layers": 2}),
        "clamped": ({"clamp": 2, "reach": 4, "share_biases": False}, {"fields": GROUPED}),
    }, chain=True, paths=BLOCKS),
    "all_attention": Reference("all_attention", all_attention, fields={"block": "no_ffn", **GROUPED}),
}
# fmt: on
