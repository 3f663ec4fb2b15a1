"""Hash layers: the token's id, not a router, says which expert it goes to."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..components import register
from ..context import LayerContext, SublayerOutput
from .dense import DenseFeedForward
from .experts import ExpertsSpec, real_tokens

_PRIME = 2**31 - 1


class HashExperts(nn.Module):
    """y_t = FFN_{h(w_t)}(x_t), h a fixed map from token ids to experts (Roller et al. 2021, arXiv 2106.04426, section 3).

    No router, no loss, no capacity. `random`: h(w) = ((a w + b) mod p) mod E with a and b drawn from the seed and the layer.
    `position`: the same map of a token's position instead of its id.
    `balanced`: a table that [`balance`] fills from token frequencies and that is saved with the model; until then it is the
    random one.
    """

    def __init__(self, config, spec: HashLayersSpec, layer_idx: int):
        super().__init__()
        self.spec = spec
        drawn = random.Random(f"{spec.seed}/{layer_idx}")  # text seeds are the same in every process
        self.factor, self.offset = drawn.randrange(1, _PRIME), drawn.randrange(_PRIME)
        self.experts = spec.make_experts(config)
        if spec.hash == "balanced":
            self.register_buffer("table", torch.zeros(config.vocab_size, dtype=torch.long))

    def initialize(self, config, init) -> None:
        self.experts.start(config, init)
        if self.spec.hash == "balanced":
            init.copy_(self.table, self.spread(torch.arange(self.table.shape[0])))

    def spread(self, ids: Tensor) -> Tensor:
        """The random map."""
        return (ids * self.factor + self.offset).remainder(_PRIME).remainder(self.spec.num_experts)

    def choose(self, context: LayerContext | None) -> Tensor:
        """Experts [B or 1, T]."""
        if context is not None and self.spec.hash == "position":
            return self.spread(context.positions)
        ids = None if context is None else context.inputs.get("input_ids")
        if ids is None:
            raise ValueError(
                "feedforward 'hash_layers' chooses experts by token id; give `input_ids`, not embeddings."
            )
        return self.table[ids] if self.spec.hash == "balanced" else self.spread(ids)

    def forward(self, hidden_states: Tensor, context: LayerContext | None) -> SublayerOutput:
        """hidden_states [B, T, D] -> [B, T, D].

        Raises:
            ValueError: the model was given `inputs_embeds`, which have no ids.
        """
        chosen = self.choose(context).expand(hidden_states.shape[:2]).reshape(-1)
        chosen = chosen.masked_fill(~real_tokens(hidden_states, context), self.spec.num_experts)
        output = self.experts(hidden_states.flatten(0, 1), chosen[:, None], None)
        return SublayerOutput(output.view_as(hidden_states))


@torch.no_grad()
def balance(model: nn.Module, counts: Sequence[int] | Tensor) -> None:
    """Fills the tables of all `hash="balanced"` layers: from the most frequent token on, each goes to the expert that has the
    least so far (Roller et al. 2021, section 3.1).

    counts: how often each id occurs, one number for each vocabulary entry.

    Raises:
        ValueError: no such layer, or the wrong number of counts.
    """
    layers = [
        module for module in model.modules() if isinstance(module, HashExperts) and module.spec.hash == "balanced"
    ]
    if not layers:
        raise ValueError(
            "`balance` fills the tables of feedforward 'hash_layers' with `hash='balanced'`; there are none."
        )
    numbers = [float(count) for count in counts]
    for layer in layers:
        if len(numbers) != layer.table.shape[0]:
            raise ValueError(
                f"`counts` has {len(numbers)} entries for a vocabulary of {layer.table.shape[0]}; give one each."
            )
        load = [(0.0, expert) for expert in range(layer.spec.num_experts)]
        table = [0] * len(numbers)
        for token in sorted(range(len(numbers)), key=lambda index: (-numbers[index], index)):
            filled, expert = heapq.heappop(load)
            table[token] = expert
            heapq.heappush(load, (filled + numbers[token], expert))
        layer.table.copy_(torch.tensor(table))


@register("feedforward", "hash_layers", aliases=("hash",))
class HashLayersSpec(ExpertsSpec):
    """One expert per token, by its id.

    layers: which layers have experts (`None`: the eighth, or the last of fewer; `every` is not read). hash: `random`,
    `balanced` with the help of [`balance`], or `position` (the token's place, section 3.1, says which). seed: of the
    random map.
    """

    summary = "the token's id chooses the expert"
    inputs: ClassVar[tuple[str, ...]] = ("input_ids",)
    contract_exceptions: ClassVar[dict[str, str]] = dict.fromkeys(
        ("inputs_embeds", "gradient_causality"), "experts are chosen by token id, which embeddings do not have"
    )
    conformance_exceptions: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "test_inputs_embeds",
            "test_inputs_embeds_matches_input_ids",
            "test_ours_generate_from_inputs_embeds",
        ),
        "experts are chosen by token id, which embeddings do not have",
    )

    num_experts: int = 32
    layers: tuple[int, ...] | None = None
    hash: Literal["random", "balanced", "position"] = "random"
    seed: int = 42

    def is_sparse(self, config, layer_idx: int) -> bool:
        layers = (min(7, config.num_hidden_layers - 1),) if self.layers is None else self.layers
        return layer_idx in layers

    def build(self, config, **where) -> nn.Module:
        layer_idx = where.get("layer_idx", 0)
        if not self.is_sparse(config, layer_idx):
            return DenseFeedForward(config, self)
        return HashExperts(config, self, layer_idx)


__all__ = ["HashExperts", "HashLayersSpec", "balance"]
