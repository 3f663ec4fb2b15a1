# SPDX-License-Identifier: Apache-2.0
"""Hedgehog: learned feature maps that imitate the spiky weights of softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.call import Call
from ..core.components import bounded, register
from .shared.learned_features import HeadMap, LearnedFeatures, LearnedFeaturesSpec, mapped


def hedgehog_features(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[softmax(W x + b), softmax(-W x - b)]: [B, H, t, d] -> [B, H, t, 2 F]."""
    logits = mapped(x, weight, bias)
    return torch.cat([torch.softmax(logits, dim=-1), torch.softmax(-logits, dim=-1)], dim=-1)


class HedgehogAttention(LearnedFeatures):
    """o_i = sum_j phi_q(q_i) phi_k(k_j) v_j / sum_j phi_q(q_i) phi_k(k_j),
    phi(x) = [softmax(W x + b), softmax(-W x - b)].

    Zhang et al. 2024 (arXiv 2402.04347), section 4.1, with the softmax over the features that keeps the exponentials
    in range (appendix A.1 there). W and b are learned for each head, apart for queries and keys, and start as identity
    and zero. They are trained to give the weights, or the output, of the softmax attention in whose place they are put
    (section 4.2); `hf-xformers linearize` does that. With rotary positions queries and keys are turned before the map.
    """

    spec: HedgehogSpec

    def __init__(self, config, spec: HedgehogSpec, **where):
        super().__init__(config, spec, **where)
        features = spec.num_features or self.head_dim
        self.query_map = HeadMap(self.num_heads, self.head_dim, features)
        self.key_map = HeadMap(self.num_heads, self.head_dim, features)

    def phi(self, x: Tensor, *params: Tensor) -> Tensor:
        return hedgehog_features(x * self.root, *params[2:])

    @property
    def query_phi(self):
        return self._query_features

    def _query_features(self, x: Tensor, *params: Tensor) -> Tensor:
        return hedgehog_features(x * self.root, *params[:2])

    def phi_params(self, context: Call) -> tuple[Tensor, ...]:
        return (*self.query_map.tensors(), *self.key_map.tensors())


@register("attention", "hedgehog")
class HedgehogSpec(LearnedFeaturesSpec):
    """num_features: rows of W, which give twice as many features (None: the width of a head). scale: factor on
    products of queries and keys, whose root multiplies both before the map (None: 1). chunk_size: tokens per quadratic
    block of the causal scan."""

    adds_up = True
    summary = "learned softmax features that imitate softmax attention: linear time, a state of constant size"
    citation = """@inproceedings{zhang2024hedgehog,
  title={The Hedgehog \\& the Porcupine: Expressive Linear Attentions with Softmax Mimicry},
  author={Zhang, Michael and Bhatia, Kush and Kumbong, Hermann and R{\\'e}, Christopher},
  booktitle={International Conference on Learning Representations},
  year={2024}
}"""

    num_features: int | None = bounded(None, least=1)
    chunk_size: int = 64

    def build(self, config, **where) -> HedgehogAttention:
        return HedgehogAttention(config, self, **where)
