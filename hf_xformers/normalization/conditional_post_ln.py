# SPDX-License-Identifier: Apache-2.0
"""Conditional layer normalization of CA-MTL: the gain of a norm after the sum depends on the task."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.call import Call
from ..core.components import register
from ..core.hand_overs import HandOver
from ..core.tasks import TaskVector
from .residual import PostLNSpec, PostNorm, Residual


class TaskGain(nn.Module):
    """y = ((1 + gamma(z)) w + beta(z)) (x - mean) / sqrt(var + eps) + b, with w and b those of a layer norm.

    Pilault, Elhattami, Pal 2021 (arXiv 2009.09139), section 2.2.3, released code: the bias is not modulated. gamma
    and beta are one map from the task's vector z, which starts at zero, so that a pretrained norm is what it was.
    """

    def __init__(self, width: int, task_width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.film = nn.Linear(task_width, 2 * width)

    def initialize(self, config, init) -> None:
        init.zeros_(self.film.weight)
        init.zeros_(self.film.bias)

    def after(self, norm: nn.LayerNorm, vectors: Tensor, task: Tensor) -> Tensor:
        """The layer norm of vectors [B, T, D], with its gain changed by task [B or 1, D]."""
        normed = norm(vectors)
        gained = normed - norm(torch.zeros_like(vectors[:1, :1]))  # without b: an adapter may stand in for the norm
        return normed + self(vectors, gained, task)

    def forward(self, vectors: Tensor, gained: Tensor, task: Tensor) -> Tensor:
        """vectors and gained [B, T, D] (w times the normalized), task [B or 1, D] -> what the task adds, [B, T, D]."""
        factor, shift = self.film(task)[:, None].chunk(2, dim=-1)
        return factor * gained + shift * F.layer_norm(vectors, vectors.shape[-1:], eps=self.eps)


class ConditionalPostNorm(PostNorm):
    """y = CLN(x + f(x); z), CLN a layer norm with [`TaskGain`]."""

    def __init__(self, config, scale: float = 1.0, stream_scale: float = 1.0):
        super().__init__(config, scale, stream_scale)
        self.gain = TaskGain(config.hidden_size, config.hidden_size, self.norm.eps)

    def inputs(self, context: Call) -> dict[str, Any]:
        return {"task": context.given(TaskVector).vector}

    def leave(self, hidden_states: Tensor, output: Tensor, gate: Tensor | None = None, **inputs: Any) -> Tensor:
        return self.gain.after(self.norm, self.summed(hidden_states, output, gate), inputs["task"])


@register("residual", "conditional_post_ln", aliases=("conditional_layer_norm",))
class ConditionalPostLNSpec(PostLNSpec):
    """layers: whose norms know the task: the `upper` half (the paper), or `all`. final_norm: also normalize after the
    last layer, as it always is."""

    supports = frozenset()
    summary = "normalize after the residual sum, with a gain that depends on the task"
    reads = frozenset({HandOver.TASK})

    layers: Literal["upper", "all"] = "upper"

    def check(self, config) -> None:
        norm = config.normalization
        if norm.type != "layer_norm" or not norm.gain:
            raise ValueError(
                "residual 'conditional_post_ln' changes the gain of a layer norm, which normalization"
                f" {norm.type!r} as it is set has not; set `normalization='layer_norm'`, or `residual='post_ln'`."
            )

    def build(self, config, **where) -> Residual:
        first = config.num_hidden_layers // 2 if self.layers == "upper" else 0
        knows = where.get("layer_idx", -1) >= first
        made = ConditionalPostNorm if knows else PostNorm
        return made(config, scale=where.get("scale", 1.0), stream_scale=self.stream_scale)
