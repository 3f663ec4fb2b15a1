"""A language-model head whose logits have one learned scale."""

import math

import torch

from hf_xformers.extend import HeadSpec, LanguageModelHead, bounded, register


class LearnedScaleHead(LanguageModelHead):
    """logits = exp(s) W h, with one learned s."""

    def __init__(self, config, spec):
        super().__init__(config, transform=None, bias=False, scale=None)
        self.spec = spec
        self.log_scale = torch.nn.Parameter(torch.empty(1))

    def initialize(self, config, init) -> None:
        super().initialize(config, init)
        init.constant_(self.log_scale, math.log(self.spec.start))

    def forward(self, hidden_states):  # [..., D] -> [..., V]
        return super().forward(hidden_states) * self.log_scale.exp()


@register("head", "learned_scale")
class LearnedScaleSpec(HeadSpec):
    """start: what logits are multiplied by before anything is learned."""

    summary = "one projection onto the vocabulary, times a learned number"

    start: float | int = bounded(1.0, above=0)

    def build(self, config, **where) -> LearnedScaleHead:
        return LearnedScaleHead(config, self)
