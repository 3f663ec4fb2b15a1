# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: modules on top of a decoder that predict the tokens behind the next one, for training and as
drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..attention.shared.base import Attention
from ..configuration_xformer import XFormerConfig
from ..core.call import Call, add_losses
from ..core.call_readers import sharding_in_force
from ..core.choices import ChoosingSpec
from ..core.components import bounded
from ..core.holes import moves_of_call, take
from ..core.losses import token_cross_entropy
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from ..core.text_parts import division_in_force
from ..normalization.base import norm_inputs
from ..stacks.driver import Pass
from .language import XFormerForCausalLM
from .module_drafts import ModuleDrafts

LOSS = "multi_token_prediction"


@register_pretraining("multi_token_prediction")
class MultiTokenSpec(PretrainingSpec):
    """depth: modules, each of which predicts a token further ahead. weight: of their mean loss next to that of the
    next token."""

    summary = "the tokens behind the next one"

    depth: int = bounded(1, least=1)
    weight: float | int = bounded(0.3, least=0)


class PredictionModule(nn.Module):
    """h'_i = Norm(Layer(W [Norm(e_{i+k}); Norm(h_i)])): states that predict token i + k + 1, from those that predict
    token i + k and the vector of that one. The layer is built as the tower's last."""

    def __init__(self, config: XFormerConfig):
        super().__init__()
        last = config.num_hidden_layers - 1
        view = config.layer(last)
        self.normalization = view.normalization
        self.token_norm, self.state_norm = view.normalization.build(view), view.normalization.build(view)
        self.join_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = config.block.build(view, layer_idx=last, cross=False)
        for module in self.layer.modules():
            if isinstance(module, Attention):
                module.config = config
        self.final_norm = view.residual.build_final(view)

    def forward(
        self, vectors: Tensor, states: Tensor, context: Call, position: Any, past_key_values: Cache | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """vectors, states [B, T, D] -> states [B, T, D], and the layer's auxiliary losses. past_key_values: a cache of
        this layer alone."""
        given = norm_inputs(self.normalization, context)
        joined = torch.cat((self.token_norm(vectors, **given), self.state_norm(states, **given)), dim=-1)
        run = Pass([self.layer], self.join_proj(joined), context, position, None, past_key_values)
        run.begin()
        run.step(0)
        states = run.output().hidden_states
        return states if self.final_norm is None else self.final_norm(states, **given), run.losses


class XFormerForMultiTokenPrediction(XFormerForCausalLM):
    """A decoder that learns to predict further tokens next to the next one.

    loss = L_0 + weight / n sum_k L_k, L_k = -mean_i log p_k(t_{i+k+1} | t_<=i+k) (DeepSeek-AI 2024, arXiv 2412.19437,
    section 2.2): module k = 1 .. n ([`PredictionModule`]) continues with the states of the one before, the first with
    the decoder's last states, and all share its token table, positions and head. Targets in another document, and
    behind padding, are none. What it generates and gives out is the decoder's, and `ForCausalLM` loads a checkpoint
    without them; `generate(use_mtp=True)` lets them draft tokens that the decoder checks ([`ModuleDrafts`]).

    The second loss is the auxiliary loss `multi_token_prediction`.
    """

    def __init__(self, config: XFormerConfig):
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # by which Trainer knows that the first column of labels is no target
        shaped: Any = self.config
        _check(shaped)
        self.settings = MultiTokenSpec.of(shaped)
        self.mtp = nn.ModuleList(PredictionModule(shaped) for _ in range(self.settings.depth))
        self.post_init()

    def further_losses(self, states: Tensor, labels: Tensor, text: dict[str, Tensor | None]) -> dict[str, Tensor]:
        if division_in_force() is not None or sharding_in_force():
            raise ValueError(
                f"{type(self).__name__} predicts tokens that other processes hold where texts are divided; train it"
                " without sequence or context parallelism."
            )
        trunk = self.model.trunk
        attention_mask, position_ids = text["attention_mask"], text["position_ids"]
        vectors = trunk._token_vectors(text["input_ids"], text["inputs_embeds"])
        moved = None if attention_mask is None else moves_of_call(attention_mask, vectors, None, drops_slots=False)
        if moved is not None and moved.order is not None:  # padding between tokens
            attention_mask = moved.mask
            states, vectors, labels = (take(x, moved.order) for x in (states, vectors, labels))
            position_ids = moved.given({"position_ids": position_ids})["position_ids"]
        context = trunk.make_context(vectors, attention_mask, position_ids)
        trunk.position.share(context, states)
        real = torch.ones_like(labels, dtype=torch.bool) if context.padding_mask is None else context.padding_mask
        document = torch.zeros_like(labels) if context.segment_ids is None else context.segment_ids
        losses: dict[str, Tensor] = {}
        total = states.new_zeros((), dtype=torch.promote_types(states.dtype, torch.float32))
        for number, module in enumerate(self.mtp, 1):
            states, more = module(_ahead(vectors, number, 0.0), states, context, trunk.position)
            add_losses(losses, more)
            place = number + (not self.config.labels_in_place)
            there = _ahead(real, place, False) & real & (_ahead(document, place, -1) == document)
            total = total + token_cross_entropy(self.lm_head(states), _ahead(labels, place, -100).where(there, -100))
        losses[LOSS] = self.settings.weight / self.settings.depth * total
        return losses

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers' own `MTPCandidateGenerator` builds `layer_class(config, index)` anew, calls it with a mask and
        # rotary tables, and reads its weights from files, as layers behind the last; ours are here, and read a `Call`.
        if getattr(generation_config, "use_mtp", None):
            return ModuleDrafts(self, generation_config, kwargs["logits_processor"])
        return super()._get_candidate_generator(generation_config, *args, **kwargs)


def _ahead(x: Tensor, places: int, value: float | int | bool) -> Tensor:
    """[B, T, ...] -> what stands so many places later, `value` where that is nothing."""
    nothing = x.new_full((x.shape[0], min(places, x.shape[1]), *x.shape[2:]), value)
    return torch.cat((x[:, places:], nothing), dim=1)


def _check(config: XFormerConfig) -> None:
    """Refuses towers whose last layer cannot run once more by itself.

    Raises:
        ValueError: names the component.
    """
    view = config.layer(config.num_hidden_layers - 1)
    carry = view.attention.carries(view)
    width = config.embedding.table_width(config)
    for spec, bad, why in (
        (config.stack, "layer_drop" not in config.stack.supports, "does not run layers one after the other"),
        (view.attention, carry is not None, "shares tensors between layers"),
        (view.attention, view.attention.inputs, "reads inputs besides tokens"),
        (
            view.attention,
            isinstance(view.attention, ChoosingSpec) and view.attention.choice_settings(),
            "draws choices, which learn from the loss of the next token",
        ),
        (view.feedforward, view.feedforward.inputs, "reads inputs besides tokens"),
        (config.embedding, width != config.hidden_size, f"has a table of width {width}, not that of the states"),
    ):
        if bad:
            raise ValueError(
                f"Multi-token prediction runs a layer on top of the last one, and {spec.slot} {spec.type!r} {why};"
                " take stack 'plain', embedding 'token' and attention such as 'dense', or train `ForCausalLM`."
            )
