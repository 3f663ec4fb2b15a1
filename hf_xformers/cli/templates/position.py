"""An attention bias that falls with the logarithm of the distance."""

import torch

from hf_xformers.extend import Position, PositionSpec, ScoreBias, register, weight_of


class LogDistance(Position, ScoreBias):
    """score_ij -= w_h log(1 + |i - j|), with one learned w_h for each head."""

    def __init__(self, config, spec):
        super().__init__()
        self.spec = spec
        self.slope = torch.nn.Parameter(torch.empty(config.num_attention_heads))

    def initialize(self, config, init) -> None:
        init.constant_(self.slope, self.spec.slope)

    def score_bias(self):
        return self

    def block(self, query_index, key_index):  # [..., Tq] and [..., Tk] -> [..., H, Tq, Tk]
        distance = (key_index.unsqueeze(-2) - query_index.unsqueeze(-1)).abs().unsqueeze(-3)
        slope = weight_of(self, "slope")  # not in a call of this module, for which Accelerate's hooks bring it
        wide = torch.promote_types(slope.dtype, torch.float32)  # bfloat16 counts to 256 and no further
        return -slope[:, None, None] * torch.log1p(distance.to(wide)).to(slope.dtype)


@register("position", "log_distance")
class LogDistanceSpec(PositionSpec):
    """slope: how much a score falls per unit of log(1 + distance), at the start."""

    summary = "scores fall with the logarithm of the distance"
    acts = frozenset({"score_bias"})

    slope: float | int = 1.0

    def build(self, config, **where) -> LogDistance:
        return LogDistance(config, self)
