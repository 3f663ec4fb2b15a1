"""Literal equations of attention among tokens that hashing or clusters bring together: sets of keys in Python."""

import torch
from transformers import initialization as init

from tests.attention.references.table import DECODER, ENCODER, Reference, written
from tests.attention.score_helpers import split_heads


def hashes(rotations, key, halves):
    """h_a(k) with a bucket as a tuple of hashes; key [d] -> one for each round."""
    found = []
    for turning in rotations:
        start, parts = 0, []
        for half in halves:
            turned = [float(key @ turning[:, start + n]) for n in range(half)]
            both = turned + [-x for x in turned]
            parts.append(both.index(max(both)))
            start += half
        found.append(tuple(parts))
    return found


def reformer(layer, x, memory=None, causal=False):
    """Every output, from the hash to the sum. In a decoder the chunk's length of the last mates, in an encoder those
    of the own chunk and the ones before; a token reads itself if it meets no other."""
    spec, n, width = layer.spec, x.shape[1], layer.head_dim
    buckets = spec.num_buckets if isinstance(spec.num_buckets, tuple) else (spec.num_buckets,)
    query, value = (split_heads(part(x), width)[0] for part in (layer.q_proj, layer.v_proj))
    weights = torch.zeros(1, len(query), n, n, dtype=torch.float64)
    for h in range(len(query)):
        key = query[h] / (query[h].square().mean(-1, keepdim=True) + 1e-6).sqrt() / width**0.5
        of_tokens = [hashes(layer.rotations[:, h], key[t], [count // 2 for count in buckets]) for t in range(n)]
        for i in range(n):
            met = []
            for a in range(spec.num_hashes):
                mates = [t for t in range(n) if of_tokens[t][a] == of_tokens[i][a]]
                if causal:
                    met += [t for t in mates if t < i][-spec.chunk_length * spec.chunks_before :]
                    continue
                # The last factor is the coarsest.
                order = sorted(range(n), key=lambda t, a=a: (*reversed(of_tokens[t][a]), t))
                chunk = {t: order.index(t) // spec.chunk_length for t in mates}
                met += [t for t in mates if chunk[i] - spec.chunks_before <= chunk[t] <= chunk[i]]
            met = [t for t in met if t != i]
            met = sorted(set(met)) if spec.deduplicate else met
            met = met or [i]
            shares = torch.softmax(query[h, i] @ key[met].T / width**0.5, dim=0)
            for t, share in zip(met, shares):
                weights[0, h, i, t] += share
    return written(layer, weights @ value), weights


def routed(layer, x):
    """Normalised queries and keys of the routed heads, [R, T, d]."""
    width = layer.head_dim
    query = split_heads(layer.q_proj(x), width)[0, layer.local :]
    key = query if layer.shared else split_heads(layer.k_proj(x), width)[0, layer.local :]
    return [torch.nn.functional.layer_norm(y, (width,)) for y in (query, key)]


def routing(layer, x, memory=None, causal=False, turn=lambda x: x):
    """Local heads read blocks; of routed ones, in a decoder, a token reads the last of its own centroid, itself
    included; else each centroid takes its nearest queries and keys, of which several memberships give the mean and
    none gives zero. Clusters are those of vectors that have not turned."""
    spec, n, width = layer.spec, x.shape[1], layer.head_dim
    weights = torch.zeros(1, layer.num_heads, n, n, dtype=torch.float64)
    if layer.local:
        q, k = (split_heads(part(x), width)[:, : layer.local] for part in (layer.q_proj, layer.k_proj))
        block = torch.arange(n) // spec.block_size
        away = block[None, :] - block[:, None]
        seen = (away >= -1) & (away <= 1)
        seen = seen & torch.ones(n, n).tril().bool() if causal else seen
        scores = turn(q) @ turn(k).mT / width**0.5
        weights[:, : layer.local] = torch.softmax(scores.masked_fill(~seen, -1e30), -1)
    q, k = routed(layer, x) if layer.local < layer.num_heads else ((), ())
    turned_q, turned_k = (turn(y[None])[0] if spec.rotates_routed else y for y in (q, k))
    for h in range(len(q)):
        near_q, near_k = (y[h] @ layer.centroids[h].T for y in (q, k))
        members_q, members_k = (
            [sorted(range(n), key=lambda t, c=c, y=y: -float(y[t, c]))[: spec.window_size] for c in range(y.shape[1])]
            for y in (near_q, near_k)
        )
        for i in range(n):
            if spec.causal_form == "strict" and causal:
                own = near_q[i].argmax()
                sets = [[t for t in range(i + 1) if near_k[t].argmax() == own][-spec.window_size :]]
            else:
                sets = [keys for asks, keys in zip(members_q, members_k) if i in asks]
                sets = [[t for t in keys if t <= i or not causal] for keys in sets]
            for s in sets:
                read = torch.softmax(turned_q[h, i] @ turned_k[h, s].T / width**0.5, 0)
                weights[0, layer.local + h, i, s] += read / len(sets)
    return written(layer, weights @ split_heads(layer.v_proj(x), width)), weights


def start(layer):
    """Rotations, and centroids with their counts, are drawn where parameters are initialized."""
    kept = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    layer.initialize(layer.config, init)
    layer.load_state_dict(kept, strict=False)


TWO_HEADS = {"num_attention_heads": 2, "use_cache": False}
REFORMER = {"type": "reformer", "chunk_length": 4, "num_hashes": 3, "num_buckets": 4}
ROUTING = {"type": "routing_transformer", "num_clusters": 3, "window_size": 4, "block_size": 4}


def by_content(spec, equation, causal=(False, True), position="none", **more):
    fields = {**TWO_HEADS, "position": position}
    more = {"prepare": start, "rounds": False, "draws": True, **more}
    return Reference(spec, equation, causal, fields=fields, **more)


# fmt: off
REFERENCES = {
    "reformer": by_content(REFORMER, reformer),
    "reformer factors": by_content({**REFORMER, "num_buckets": (2, 6)}, reformer),
    "reformer multiset": by_content({**REFORMER, "deduplicate": False}, reformer),
    "reformer two before": by_content({**REFORMER, "chunks_before": 2, "chunk_length": 2}, reformer),
    "routing": by_content(ROUTING, routing),
    "routing all heads": by_content({**ROUTING, "num_routing_heads": 2}, routing),
    "routing turned": by_content(
        {**ROUTING, "num_routing_heads": 2, "rotates_routed": True}, routing, turns=True, position="rotary",
    ),
    "routing local": by_content({**ROUTING, "num_routing_heads": 0}, routing, turns=True),
    "routing apart": by_content({**ROUTING, "num_routing_heads": 2, "share_qk": False}, routing, ENCODER),
    "routing paper": by_content({**ROUTING, "causal_form": "paper"}, routing, DECODER, cached=False),
}
# fmt: on
