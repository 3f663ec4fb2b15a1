# SPDX-License-Identifier: Apache-2.0
"""Reformer (Kitaev, Kaiser, Levskaya 2020): attention inside hash buckets, and reversible layers."""

from __future__ import annotations

from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ALL_HEADS, VariantInfo, make_family


class XFReformerConfig(XFormerConfig):
    """Reformer (Kitaev, Kaiser, Levskaya 2020): attention inside hash buckets, and reversible layers."""

    model_type = "xf_reformer"

    hidden_size: int = 1024
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    max_position_embeddings: int = 65536
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    position: SpecLike = "sinusoidal_absolute"
    attention: SpecLike = "reformer"
    residual: SpecLike = "pre_ln"
    feedforward: SpecLike = "relu"
    stack: SpecLike = "reversible"


INFO = VariantInfo(
    section="4.1",
    summary="attention among tokens that share a hash bucket, shared queries and keys, reversible layers",
    paper="Kitaev et al. 2020",
    url="https://arxiv.org/abs/2001.04451",
    equation=(
        r"o_i = \sum_{j \in \bigcup_a P_i^a} \mathrm{softmax}_j\!\left(\frac{q_i \cdot k_j}{\sqrt{d}}\right) v_j, "
        r"\quad P_i^a = \{j : h_a(q_i) = h_a(q_j)\}, \quad h_a(x) = \arg\max\,[x R_a ; -x R_a], \quad k_j = q_j /"
        r" |q_j|"
    ),
    cost="time O(r T (m D + log T)) for r hashes and chunks of m tokens; activations O(T D) at any depth",
    cite="kitaev2020reformer",
    notes=(
        "Decoders read the most recent tokens of a bucket, so that they can generate; the paper's chunks, whose"
        " borders later tokens move, are attention field causal_form='paper'. The number of buckets follows the length"
        " of each text, in decoders that of the text so far. The two streams are averaged at the end."
    ),
)

make_family(XFReformerConfig, "XFReformer", ALL_HEADS, INFO)
