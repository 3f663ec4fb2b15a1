# SPDX-License-Identifier: Apache-2.0
"""Base of attention specs: the fields that every mechanism has, and what it can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ...core.components import Spec, bounded
from ...core.prepared import Carry
from ...core.sequence_parallel import SequenceForm, Unserved
from ...ops.common.token_grid import TokenGrid
from .head_parts import HeadAggregation, build_aggregation, build_losses


@dataclass(kw_only=True)
class AttentionSpec(Spec):
    """Base of attention specs: fields every mechanism has, and what it can do.

    `keeps_keys_alone`, `keeps_rotated` and `knows_order` are what other components ask for.

    Attributes:
        max_global_tokens: bound on the global tokens of a row, where a mechanism has such tokens and bounds them.
        acts: what of a position inside attention it reads (configs refuse the rest). `rotation`: queries and keys are
            turned; linear attention turns them before its features, as far as its own equation does not say otherwise;
            `values`: values and its output may be turned as well. `score_bias`, `score_terms`, `head_terms`: what is
            added to scores, and to queries, keys and values.
        keeps_keys_alone: its state for generation is keys and values, or can be made of them again, so that a block
            may keep a state of its own next to them.
        keeps_rotated: its state for generation holds what rotations have made of earlier keys, which cannot be turned
            anew.
        knows_order: it knows the order of tokens by parameters of its own, without a position.
        head_options: which of the fields below it has a place for. `norm`: queries and keys may be normalized
            (`query_key_norm`). `cap`: scores may be capped (`score_cap`). `sink`: softmax may have a learned sink
            (`learned_sinks`). `parts`: what each head has read and its values can be had head by head
            ([`Attention.written`], [`Attention.losses`]), so that heads may be joined in another way (`output_gate`,
            `aggregation`) and have `losses`. `blocks`: the weights of some queries can be had without those of all
            ([`Attention.weights_of_block`]), as losses on them need.

    Args:
        bias: biases on the projections.
        output_bias: the same for the output projection (`None`: as the others).
        scale: factor on scores (`None`: 1 / sqrt(head width); T5: 1.0).
        query_key_norm: the config's normalization on queries and keys, before rotation: of each `head` (Qwen 3;
            Dehghani et al. 2023, arXiv 2302.05442, section 2), the same with a gain of its own for `each_head`
            (StableLM 2), or of the whole `projection` (OLMo 2).
        score_cap: scaled scores s become c tanh(s / c), so that they stay within c (Gemma 2; Bello et al. 2016, arXiv
            1611.09940, section 5.1).
        angles: which rotation of a rotary position the layer has, that of all layers (`global`), the `local` one, or
            `none`.
        aggregation: how heads are joined in place of standing side by side (`routing_aggregation`, `capsule_heads`;
            `None`: side by side).
        losses: auxiliary losses of training on what heads do (`disagreement_regularization`, `attention_guidance`).
        learned_sinks: a learned score s of each head in the denominator of its softmax, exp(q k_j) / (exp(s) + sum_j
            exp(q k_j)), so that a head can read nothing (GPT-OSS, OpenAI 2025, arXiv 2508.10925, section 2.1; s = 0 is
            Miller 2023's softmax with one added).
        output_gate: what heads have read times sigmoid(W x), x the layer's input, with one number for each `head` or
            for each `element` (Qiu et al. 2025, arXiv 2505.06708, section 2.2; Qwen3-Next).
    """

    bidirectional: ClassVar[bool] = True
    cross: ClassVar[bool] = False
    acts: ClassVar[frozenset[str]] = frozenset({"rotation"})
    head_options: ClassVar[frozenset[str]] = frozenset()
    max_global_tokens: ClassVar[int | None] = None
    keeps_keys_alone: ClassVar[bool] = False
    keeps_rotated: ClassVar[bool] = False
    knows_order: ClassVar[bool] = False

    bias: bool = True
    output_bias: bool | None = None
    scale: float | int | None = bounded(None, above=0)
    query_key_norm: Literal["none", "head", "each_head", "projection"] = "none"
    score_cap: float | int | None = bounded(None, above=0)
    angles: Literal["global", "local", "none"] = "global"
    aggregation: dict | str | HeadAggregation | None = None
    losses: tuple[Any, ...] = ()
    learned_sinks: bool = False
    output_gate: Literal["none", "head", "element"] = "none"

    def __post_init__(self) -> None:
        self.aggregation = build_aggregation(self.aggregation)
        self.losses = build_losses(self.losses)

    @property
    def has_output_bias(self) -> bool:
        return self.bias if self.output_bias is None else self.output_bias

    def carries(self, config: Any) -> Carry | None:
        """What all layers of a tower with this mechanism share; config: of a layer."""
        return None

    def rotated_width(self, config: Any) -> int:
        """The width of that part of a head's queries and keys which a rotation is made for."""
        return config.head_width

    def places(self, config: Any) -> int | None:
        """Longest sequence (tokens) that its parameters have places for; None without a limit."""
        return None

    def sequence_form(self, config: Any) -> SequenceForm | Unserved:
        """How it is computed where every process holds a part of each text (`context.parts`), or why it is not;
        config: of a layer."""
        return Unserved("reads more of a text than the part that a process holds")

    def projects_keys(self, config: Any) -> bool:
        """Whether all heads have keys of their own, which `k_proj` makes."""
        return True

    def weighs(self, config: Any) -> bool:
        """Whether the weights given out are not negative and sum to one over the tokens that a query sees."""
        return not self.learned_sinks

    def cache_layer(self, config: Any, layer_idx: int = 0) -> CacheLayerMixin:
        """A new layer of a generation cache, for the state of one execution step of this layer."""
        return DynamicLayer()

    def traced_length(self, config: Any) -> int:
        """How many tokens a text needs to have, as far as `config` allows, for the graph that is traced of it to be
        that of every text: a graph of a text that is one block alone knows no others."""
        return 2

    def token_grid(self, config: Any) -> TokenGrid | None:
        """The grid that it reads a sequence as; None: it knows none."""
        return None

    def takes_global_tokens(self) -> bool:
        """Whether tokens chosen by the input `global_attention_mask` see all others and are seen by them."""
        return "global_attention_mask" in self.inputs
