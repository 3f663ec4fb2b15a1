# SPDX-License-Identifier: Apache-2.0
"""Low-rank and band attention (Guo et al. 2019): a narrow attention for the whole text, a band for what is near."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..core.components import SpecLike
from ..families import ALL_HEADS, VariantInfo, make_family


class XFLowRankBandConfig(XFormerConfig):
    """Low-rank and band attention (Guo et al. 2019): a narrow attention for the whole text, a band for what is
    near."""

    model_type = "xf_low_rank_band"

    attention: SpecLike = "low_rank_band"


INFO = VariantInfo(
    section="4.4",
    summary="queries and keys of low rank for the whole text, and a band of full width for its neighbourhood",
    paper="Guo et al. 2019",
    url="https://doi.org/10.1109/TASLP.2019.2944078",
    equation=r"o_i = \mathrm{softmax}\!\left(\frac{q^r_i {K^r}^\top}{\sqrt r}\right) V^r + "
    r"\mathrm{softmax}_{|i - j| \le w}\!\left(\frac{q_i K^\top}{\sqrt d}\right) V",
    cost=(
        "time O(T^2 D) with scores of width r, quadratic as it is, and O(T w D) for the band; memory O(T D) with fused"
        " kernels; D^2 + 2 r H D parameters more in a layer of H heads"
    ),
    cite="guo2019low",
    notes=(
        "Rank, width of the band and how both parts are joined are not those of the paper, whose text was not to be"
        " had; they are fields (`low_rank`, `band_width`, `combine`). The parts are added, so that weights sum to 2."
    ),
)

make_family(XFLowRankBandConfig, "XFLowRankBand", ALL_HEADS, INFO)
