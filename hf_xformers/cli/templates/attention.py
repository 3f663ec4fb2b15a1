"""Softmax attention whose scores fall linearly with distance."""

import torch
import torch.nn.functional as F

from hf_xformers.extend import (
    Attention,
    AttentionSpec,
    boolean_mask,
    bounded,
    literal_softmax_attention,
    register,
)


class DistanceDecayAttention(Attention):
    """o_i = sum_j softmax_j(q_i k_j / sqrt(d) - slope |i - j|) v_j over the j that i may see."""

    def prepare(self, context, past_key_values):  # once per call, shared by all layers
        if "distance_decay" not in context.shared:
            distance = (context.query_index[:, None] - context.key_index[None, :]).abs()
            mask = boolean_mask(context)
            if context.causal and mask is None:
                mask = (context.key_index[None, :] <= context.query_index[:, None])[None, None]
            context.shared["distance_decay"] = (distance, mask)

    def attend(self, query, key, value, context):
        distance, mask = context.shared["distance_decay"]
        bias = -self.spec.slope * distance.to(query.dtype)
        if self.wants_weights(context):  # the literal equation, with its weights
            return literal_softmax_attention(query, key, value, mask, bias, self.scaling)
        if mask is not None:
            bias = bias.masked_fill(~mask, torch.finfo(query.dtype).min)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=self.scaling, enable_gqa=True)
        return output.transpose(1, 2), None


@register("attention", "distance_decay")
class DistanceDecaySpec(AttentionSpec):
    """slope: how much a score falls per token of distance."""

    summary = "scores fall linearly with distance"

    slope: float | int = bounded(0.1, least=0)

    def build(self, config, **where) -> DistanceDecayAttention:
        return DistanceDecayAttention(config, self, **where)
