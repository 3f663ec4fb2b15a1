# SPDX-License-Identifier: Apache-2.0
"""Graphormer (Ying et al. 2021): a Transformer over the nodes of a graph, whose scores know the paths between them."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike, preset
from ..families import ENCODER_HEADS, VariantInfo, make_family


class XFGraphormerConfig(XFormerConfig):
    """Graphormer (Ying et al. 2021): a Transformer over the nodes of a graph, whose scores know the paths between
    them."""

    model_type = "xf_graphormer"

    vocab_size: int = 4609
    num_attention_heads: int = 32
    intermediate_size: int = 768
    embedding: SpecLike = preset(
        {
            "type": "token",
            "id_tables": (("in_degree", 512), ("out_degree", 512)),
            "absent_ids": "first",
        }
    )
    position: SpecLike = "graphormer"
    residual: SpecLike = "pre_ln"


INFO = VariantInfo(
    section="4.5",
    summary="attention over the nodes of a graph, with biases for path lengths and edges, and vectors for degrees",
    paper="Ying et al. 2021",
    url="https://arxiv.org/abs/2106.05234",
    equation=(
        r"h_i^0 = x_i + z^-_{\deg^-(i)} + z^+_{\deg^+(i)}, \qquad A_{ij} = \frac{q_i k_j^\top}{\sqrt d} +"
        r" b_{\mathrm{SPD}(i, j)} + \frac{1}{L} \sum_{n=1}^{L} x_{e_n} W_n"
    ),
    cost="time O(T^2 D), memory O(H T^2) for the bias of a graph with T nodes, which all layers share",
    cite="ying2021transformers",
    notes=(
        "`hf_xformers.data.graphs.GraphCollator` makes batches of graphs: `input_ids` are types of nodes behind a"
        " token for the graph, which classifiers read; `in_degree`, `out_degree`, `spatial_pos` and `edge_paths` are"
        " further inputs. Without `spatial_pos` a text is a graph in which each token is a neighbor of the next."
    ),
)

make_family(XFGraphormerConfig, "XFGraphormer", ENCODER_HEADS, INFO)
