# SPDX-License-Identifier: Apache-2.0
"""Cross-layer attention: several layers read the keys and values of the first of them."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from ..core.call import Call
from ..core.components import bounded, register
from ..core.prepared import Carry, State, States, one_state
from ..core.sequence_parallel import SequenceForm, Unserved
from .dense import DenseAttention, DenseSpec


class SharedKeys(State):
    """Keys and values [B, K, S, d] that a layer has made of all tokens so far, for those above it."""

    keys: Tensor
    values: Tensor


class CrossLayerAttention(DenseAttention):
    """o^l = softmax(W_q^l x^l K^T / sqrt(d)) V with K = W_k x^f, V = W_v x^f of the first layer f of l's group.

    Brandon et al. 2024 (arXiv 2405.12981), section 3: layers stand in groups of `sharing_factor`, of which all but the
    first have neither key nor value projections, and no part of the cache. With one group above `first_layer`, and
    layers with a small state below, it is the decoder-decoder of YOCO (Sun et al. 2024, arXiv 2405.05254, section 2):
    one set of keys and values, made of what the lower half gives, and a prompt of which the layers above read the last
    token alone ([`PlainStack`](../stacks/plain.py)). Rotated keys are shared as they are. Time: that of dense
    attention without these projections. State: keys and values of the first layer of each group.

    Raises:
        ValueError: no layer below has passed keys on.
    """

    spec: CrossLayerSpec
    unpads = True

    def __init__(self, config, spec: CrossLayerSpec, **where):
        super().__init__(config, spec, **where)
        self.makes_keys = spec.owner(self.layer_idx) == self.layer_idx
        if not self.makes_keys:
            self.k_proj = self.v_proj = None  # type: ignore[assignment]
            self.k_norm = None

    def project_self(
        self, hidden_states: Tensor, context: Call, past_key_values: Cache | None, step: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.makes_keys:
            return super().project_self(hidden_states, context, past_key_values, step)
        shared = context.state(SharedKeys)
        if shared is None:
            raise ValueError(
                f"cross_layer_attention of layer {self.layer_idx} reads the keys of layer"
                f" {self.spec.owner(self.layer_idx)}, which has not run before it."
            )
        query = self.heads(context.padded(self._normalized(self.q_norm, self.q_proj(hidden_states))))
        rotation = self.rotation(context)
        return query if rotation is None else rotation(query), shared.keys, shared.values

    def passed_on(self, key: Tensor, value: Tensor) -> States | None:
        return one_state(SharedKeys(key, value)) if self.makes_keys else None


@register("attention", "cross_layer_attention", aliases=("cla",))
class CrossLayerSpec(DenseSpec):
    """sharing_factor: layers that share keys and values, the first of which makes them (the last group may have fewer;
    `None`: all from `first_layer` on). first_layer: where the first group begins; layers below have keys and values of
    their own."""

    summary = "several layers share the keys and values of the first"
    cross = False
    acts = frozenset({"rotation", "score_bias"})
    supports = frozenset({"packed_rows", "pair_mask"})
    keeps_keys_alone = False
    reads = frozenset()

    sharing_factor: int | None = bounded(2, least=1)
    first_layer: int = bounded(0, least=0)

    def owner(self, layer_idx: int) -> int:
        """The layer whose keys and values this one reads."""
        above = layer_idx - self.first_layer
        if above < 0:
            return layer_idx
        return layer_idx - (above if self.sharing_factor is None else above % self.sharing_factor)

    def carries(self, config) -> Carry:
        sizes = config.key_value_heads, config.head_width, self.sharing_factor, self.first_layer
        return Carry(SharedKeys, sizes, owner=self.owner, handed_on=True)

    def projects_keys(self, config) -> bool:
        return False

    def sequence_form(self, config) -> SequenceForm | Unserved:
        return Unserved("reads every key of a text")

    def build(self, config, **where) -> CrossLayerAttention:
        return CrossLayerAttention(config, self, **where)
