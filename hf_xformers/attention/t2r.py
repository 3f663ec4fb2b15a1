# SPDX-License-Identifier: Apache-2.0
"""T2R and SUPRA: learned ReLU features, with a denominator or with a norm in its place."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import bounded, register
from .shared.learned_features import HeadMap, LearnedFeatures, LearnedFeaturesSpec, mapped


class T2RAttention(LearnedFeatures):
    """o_i = sum_j phi(q_i) phi(k_j) v_j / sum_j phi(q_i) phi(k_j), phi(x) = relu(W x + b).

    Kasai et al. 2021 (arXiv 2103.13076), section 2.2: one W and b for each head, for queries and keys alike. They
    start as identity and zero here, so that the features of a trained model's queries and keys say something from the
    first step on.

    With `output_norm` a root mean square norm of each head's output, with a learned weight, takes the denominator's
    place: Mercat et al. 2024 (SUPRA, arXiv 2405.06640), section 3. As a denominator cancels in that norm, it is left
    in, and keeps sums in the range of half precision. With rotary positions queries and keys are turned before the
    map.
    """

    spec: T2RSpec
    undecayed = ("output_norm",)

    def __init__(self, config, spec: T2RSpec, **where):
        super().__init__(config, spec, **where)
        self.eps, self.norm_eps = float(spec.eps), config.layer_norm_eps
        self.feature_map = HeadMap(self.num_heads, self.head_dim, spec.num_features or self.head_dim)
        self.normed = spec.normalization == "output_norm"
        if self.normed:
            self.output_norm = nn.Parameter(torch.ones(self.num_heads, self.head_dim))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        if self.normed:
            init.ones_(self.output_norm)

    def phi(self, x: Tensor, *params: Tensor) -> Tensor:
        return torch.relu(mapped(x * self.root, *params))

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        return self.feature_map.tensors()

    def finished(self, output: Tensor) -> Tensor:
        if not self.normed:
            return output
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        return normed.to(output.dtype) * self.output_norm[:, None]


@register("attention", "t2r", aliases=("supra",))
class T2RSpec(LearnedFeaturesSpec):
    """
    Args:
        num_features: rows of W (None: the width of a head).
        normalization: `denominator` (T2R), or `output_norm`, an RMS norm of each head's output in its place (SUPRA).
        eps: added to the denominator, as the features of a query may all be zero.
        scale: factor on products of queries and keys, whose root multiplies both before the map (None: 1).
        chunk_size: tokens per quadratic block of the causal scan.
    """

    adds_up = True
    summary = "learned ReLU features: linear time, a state of constant size"
    citation = """@inproceedings{kasai2021finetuning,
  title={Finetuning Pretrained Transformers into {RNN}s},
  author={Kasai, Jungo and Peng, Hao and Zhang, Yizhe and Yogatama, Dani and Ilharco, Gabriel and Pappas, Nikolaos and
          Mao, Yi and Chen, Weizhu and Smith, Noah A.},
  booktitle={Conference on Empirical Methods in Natural Language Processing},
  year={2021}
}"""

    num_features: int | None = bounded(None, least=1)
    normalization: Literal["denominator", "output_norm"] = "denominator"
    eps: float | int = bounded(1e-6, least=0)
    chunk_size: int = 64

    def weighs(self, config) -> bool:
        return False  # all features of a query may be zero

    def build(self, config, **where) -> T2RAttention:
        return T2RAttention(config, self, **where)
