"""A running mean in place of attention, whose weights are the keys' and whose gates are the queries'."""

import torch
import torch.nn.functional as F

from hf_xformers.extend import (
    Attention,
    AttentionSpec,
    RecurrentStateLayer,
    SublayerOutput,
    register,
    state_layer,
)


class GatedMeanAttention(Attention):
    """o_i = sigmoid(q_i) * sum_j w_j v_j / sum_j w_j over the j <= i, w_j = softplus(k_j), entry by entry.

    Time O(T D). State: the two sums [H, d] of each text, whatever its length.
    """

    def forward(self, hidden_states, context, *, memory=None, past_key_values=None, step=None):
        layer = state_layer(past_key_values, self.layer_idx if step is None else step)  # None without a cache
        query, key, value = self.projected_heads(hidden_states)  # [B, H, T, d]
        wide = torch.promote_types(key.dtype, torch.float32)  # sums of many numbers
        weight, value = F.softplus(self.repeated(key).to(wide)), self.repeated(value)
        if context.query_padding_mask is not None:  # [B, T], True = a real token
            weight = weight * context.query_padding_mask[:, None, :, None]
        sums, weights = (weight * value).cumsum(2), weight.cumsum(2)
        if layer is not None:
            if layer.state:
                sums = sums + layer.state["sum"][:, :, None]
                weights = weights + layer.state["weight"][:, :, None]
            layer.advance(hidden_states.shape[1], sum=sums[:, :, -1], weight=weights[:, :, -1])
        mean = (sums / weights.clamp(min=torch.finfo(weights.dtype).tiny)).to(query.dtype)
        output = (torch.sigmoid(query) * mean).transpose(1, 2)
        return SublayerOutput(self.written(output, context, hidden_states), None)


@register("attention", "gated_mean")
class GatedMeanSpec(AttentionSpec):
    """No settings besides those of all."""

    summary = "a running mean, weighed by keys and gated by queries: a state of constant size"
    bidirectional = False
    acts = frozenset()  # positions inside attention

    def cache_layer(self, config, layer_idx) -> RecurrentStateLayer:
        return RecurrentStateLayer()

    def build(self, config, **where) -> GatedMeanAttention:
        return GatedMeanAttention(config, self, **where)
