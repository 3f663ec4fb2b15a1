# SPDX-License-Identifier: Apache-2.0
"""Hash layers (Roller et al. 2021): a fixed map from token ids to experts in place of a router."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFHashLayersConfig(XFormerConfig):
    """Hash layers (Roller et al. 2021): a fixed map from token ids to experts in place of a router."""

    model_type = "xf_hash_layers"

    feedforward: SpecLike = "hash_layers"


INFO = VariantInfo(
    section="5.3",
    summary="a fixed map from token ids to feed-forward experts, without router and loss",
    paper="Roller et al. 2021",
    url="https://arxiv.org/abs/2106.04426",
    equation=r"y_t = \mathrm{FFN}_{h(w_t)}(x_t), \qquad h \text{ fixed}",
    cost="time of the dense model; E times the feed-forward parameters of the layer that has experts",
    cite="roller2021hash",
    notes=(
        "Needs `input_ids`; `inputs_embeds` are refused. The random map is a hash function; with `hash: balanced` it"
        " is a table, filled by `hf_xformers.feedforward.hash_layers.balance(model, counts)` from token frequencies"
        " (`hf-xformers pretrain` counts those of its text) and saved with the model. With `hash: clustered` tokens of"
        " like vectors share an expert, with `hash: dispersed` they have different ones: `cluster(model, vectors)` of"
        " the same module makes that table by k-means, from vectors or from a trained model's embeddings. With `hash:"
        " position` the token's place chooses. `multi_hash: N` puts each token's network together from N slices that N"
        " hashes choose. In masked language modeling all masked positions share one expert."
    ),
)

make_family(XFHashLayersConfig, "XFHashLayers", ALL_HEADS, INFO)
