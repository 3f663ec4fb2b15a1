# SPDX-License-Identifier: Apache-2.0
"""Multi-head attention as collaborative attention: the tensor of all heads' scores, factorized."""

from __future__ import annotations

import torch
from torch import Tensor

from .derivations import Derived, Part, derives

_STEPS = 50


def shared_factors(queries: Tensor, keys: Tensor, rank: int, steps: int = _STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Factors U, V [rank, D] and M [H, rank] such that U^T diag(M_h) V is near Q_h^T K_h for all heads.

    queries, keys [H, d, D]. With rank >= H d the factors are exact: queries and keys themselves, each head's channels
    for itself, and zeros beyond. Below, alternating least squares (a canonical polyadic decomposition, as Cordonnier,
    Loukas, Jaggi 2020, arXiv 2006.16362, section 4) from the best exact factors of single heads, the `rank` largest
    singular triples of all Q_h^T K_h. Nothing is random, and no [H, D, D] tensor is made.
    """
    heads, channels, width = queries.shape
    if rank >= heads * channels:
        mixing = queries.new_zeros(heads, rank)
        for head in range(heads):
            mixing[head, head * channels : (head + 1) * channels] = 1
        spare = queries.new_zeros(rank - heads * channels, width)
        return torch.cat((queries.flatten(0, 1), spare)), torch.cat((keys.flatten(0, 1), spare)), mixing
    left, right, mixing = _largest_triples(queries, keys, rank)
    for _ in range(steps):
        # Q_h^T (K_h v_r) m_hr summed over heads, and the like: gradients' linear parts, and their Gram matrices.
        seen = torch.einsum("hcw,rw->hcr", keys, right)
        left = _solved((right @ right.T) * (mixing.T @ mixing), torch.einsum("hcw,hcr,hr->rw", queries, seen, mixing))
        asked = torch.einsum("hcw,rw->hcr", queries, left)
        right = _solved((left @ left.T) * (mixing.T @ mixing), torch.einsum("hcw,hcr,hr->rw", keys, asked, mixing))
        seen = torch.einsum("hcw,rw->hcr", keys, right)
        mixing = _solved((left @ left.T) * (right @ right.T), (asked * seen).sum(1).T).T
        lengths = [x.norm(dim=1).clamp(min=1e-30) for x in (left, right)]
        left, right = left / lengths[0][:, None], right / lengths[1][:, None]
        mixing = mixing * lengths[0] * lengths[1]
    size = mixing.abs().amax(0).clamp(min=1e-30).pow(1 / 3)  # all factors of one size
    return left * size[:, None], right * size[:, None], mixing / size**2


def relative_error(queries: Tensor, keys: Tensor, left: Tensor, right: Tensor, mixing: Tensor) -> float:
    """|Q_h^T K_h - U^T diag(M_h) V| / |Q_h^T K_h|, norms over all heads."""
    whole = ((queries @ queries.mT) * (keys @ keys.mT)).sum()
    met = torch.einsum("hcw,rw->hcr", queries, left) * torch.einsum("hcw,rw->hcr", keys, right)
    made = ((left @ left.T) * (right @ right.T) * (mixing.T @ mixing)).sum()
    return float(((whole - 2 * (met.sum(1) * mixing).sum() + made).clamp(min=0) / whole.clamp(min=1e-300)).sqrt())


def _largest_triples(queries: Tensor, keys: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular triples of all Q_h^T K_h, each for its own head. Those that several heads share are
    taken once while there are others: factors that are alike are a start from which little is found."""
    heads = queries.shape[0]
    base_q, coordinates_q = torch.linalg.qr(queries.mT)  # Q_h^T = base R
    base_k, coordinates_k = torch.linalg.qr(keys.mT)
    u, values, v = torch.linalg.svd(coordinates_q @ coordinates_k.mT)
    order = values.flatten().argsort(descending=True, stable=True)
    left, right = (x.mT.flatten(0, 1)[order] for x in (base_q @ u, base_k @ v.mT))
    alike = ((left @ left.T) * (right @ right.T)).tril(-1) > 0.99  # both vectors may have turned around
    repeated = alike.any(1).int()
    chosen = repeated.argsort(stable=True)[:rank]
    mixing = torch.zeros(heads, rank).to(queries)
    mixing[order[chosen] // values.shape[1], torch.arange(rank)] = values.flatten()[order[chosen]]
    return left[chosen], right[chosen], mixing


def _solved(gram: Tensor, wanted: Tensor) -> Tensor:
    """gram^-1 wanted; what the factors do not determine stays small."""
    ridge = 1e-12 * gram.diagonal().mean()
    return torch.linalg.solve(gram + ridge * torch.eye(len(gram)).to(gram), wanted)


@derives("attention", "collaborative_attention")
def factorised_heads(old: Part, new: Part) -> dict[str, Derived]:
    """Queries, keys and mixing of heads that had projections of their own; their biases of queries become the content
    bias, and those of keys, which are the same for all keys, mean nothing."""
    sources = ("q_proj.weight", "k_proj.weight")
    heads, groups = old.config.num_attention_heads, old.config.key_value_heads
    channels, width = old.config.head_width, old.config.hidden_size
    found = [old.tensors[name] for name in sources if name in old.tensors]
    shapes = [(heads * channels, width), (groups * channels, width)]
    if "mixing" in old.tensors or [tuple(x.shape) for x in found] != shapes:  # heads have no projections of their own
        return {}
    dtype = found[0].dtype
    queries, keys = (x.double().unflatten(0, (-1, channels)) for x in found)
    keys = keys.repeat_interleave(heads // groups, 0)
    rank = new.tensors["mixing"].shape[1]
    left, right, mixing = shared_factors(queries, keys, rank)
    if rank < heads * channels:
        how = f"{rank} shared channels, relative error {relative_error(queries, keys, left, right, mixing):.2g}"
    else:
        how = "each head's channels for itself"
    made = {"q_proj.weight": left, "k_proj.weight": right, "mixing": mixing}
    derived = {name: Derived(tensor.to(dtype), sources, how) for name, tensor in made.items()}
    if "content_proj.weight" in new.tensors:
        bias = old.tensors.get("q_proj.bias")
        if bias is None:
            content = torch.zeros(heads, width)
            derived["content_proj.weight"] = Derived(content.to(dtype), (), "zero: queries had no bias")
        else:
            content = torch.einsum("hc,hcw->hw", bias.double().unflatten(0, (-1, channels)), keys)
            named = ("q_proj.bias", "k_proj.weight")
            derived["content_proj.weight"] = Derived(content.to(dtype), named, "biases of queries on keys")
    return derived
