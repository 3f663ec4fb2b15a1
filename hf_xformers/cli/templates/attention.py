"""Softmax attention whose scores fall linearly with distance."""

import torch
import torch.nn.functional as F

from hf_xformers.extend import (
    Attention,
    AttentionSpec,
    Prepared,
    bounded,
    literal_softmax_attention,
    register,
    visible_pairs,
)


class Distances(Prepared):
    """|i - j| of a call's tokens and keys, [T, S]."""

    of_pairs: torch.Tensor


class DistanceDecayAttention(Attention):
    """o_i = sum_j softmax_j(q_i k_j / sqrt(d) - slope |i - j|) v_j over the j that i may see."""

    def prepare(self, context, past_key_values):  # what it makes is there for all layers of the call
        places = context.query_index[:, None], context.key_index[None, :]
        context.prepare(Distances, lambda: Distances((places[0] - places[1]).abs()))

    def attend(self, query, key, value, context):
        bias, mask = -self.spec.slope * context.prepared(Distances).of_pairs.to(query.dtype), visible_pairs(context)
        if self.wants_weights(context):  # the literal equation, with its weights
            return literal_softmax_attention(query, key, value, mask, bias, self.scaling, self.dropout_now)
        if mask is not None:
            bias = bias.masked_fill(~mask, torch.finfo(query.dtype).min)
        output = F.scaled_dot_product_attention(
            query, key, value, bias, self.dropout_now, scale=self.scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None


@register("attention", "distance_decay")
class DistanceDecaySpec(AttentionSpec):
    """slope: how much a score falls per token of distance."""

    summary = "scores fall linearly with distance"

    slope: float | int = bounded(0.1, least=0)

    def build(self, config, **where) -> DistanceDecayAttention:
        return DistanceDecayAttention(config, self, **where)
