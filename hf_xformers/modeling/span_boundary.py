# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling and the tokens of a span from its two neighbors: SpanBERT's objectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..compat import project, shared_setting
from ..core import outputs
from ..core.components import bounded
from ..core.inputs import check_token_labels
from ..core.losses import step_share, token_cross_entropy
from ..core.pretraining_specs import PretrainingSpec, register_pretraining
from .language_model import LanguageModel


@register_pretraining("span_boundary")
class SpanBoundarySpec(PretrainingSpec):
    """places: tokens of a span that its neighbors tell. place_width: width of the vectors of these places. weight: of
    that loss next to the masked tokens'."""

    summary = "masked tokens, and those of a span from its two neighbors (SpanBERT)"

    places: int = bounded(20, least=1)
    place_width: int = bounded(200, least=1)
    weight: float | int = bounded(1.0, least=0)


class SpanBoundaryHead(nn.Module):
    """h = LN(GELU(W1 [x_(s-1); x_(e+1); p_(i-s)])), y = LN(GELU(W2 h)), logits = E y + b (Joshi et al. 2020, arXiv
    1907.10529, section 3.2), with E the token table unless the config unties it.

    x are the states of the tokens before and behind a span s..e, p_k the vector of its k-th place.
    """

    def __init__(self, width: int, table: int, vocab_size: int, places: int, place_width: int, eps: float):
        super().__init__()
        self.places = nn.Embedding(places, place_width)
        self.dense_in = nn.Linear(2 * width + place_width, width)
        self.norm_in = nn.LayerNorm(width, eps=eps)
        self.dense_out = nn.Linear(width, table)
        self.norm_out = nn.LayerNorm(table, eps=eps)
        self.decoder = nn.Linear(table, vocab_size)

    def forward(self, left: Tensor, right: Tensor, place: Tensor) -> Tensor:
        """left, right: [..., D]; place: [...]. Returns logits [..., V]."""
        hidden = torch.cat([left, right, self.places(place).to(left.dtype)], dim=-1)
        hidden = self.norm_in(F.gelu(self.dense_in(hidden)))
        return project(self.decoder, self.norm_out(F.gelu(self.dense_out(hidden))))


class XFormerForSpanBoundary(LanguageModel):
    """An encoder that predicts masked tokens twice: each from its own state, and those of a span from the states of
    the tokens around it.

    The second loss, times `weight` of [`SpanBoundarySpec`], is the auxiliary loss `span_boundary`.
    """

    accepts_loss_kwargs = True  # `num_items_in_batch`

    def __init__(self, config):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        super().__init__(config)
        self.settings = SpanBoundarySpec.of(config)
        width = config.stack.output_width(config)
        self.boundary_head = SpanBoundaryHead(
            width,
            config.embedding.table_width(config),
            config.vocab_size,
            self.settings.places,
            self.settings.place_width,
            shared_setting(config, "layer_norm_eps"),
        )
        if "decoder.weight" in config.head.tied(config):
            self._tied_weights_keys["boundary_head.decoder.weight"] = "model.trunk.embedding.tokens.weight"
        self.post_init()

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> nn.Embedding:
        table = super().resize_token_embeddings(new_num_tokens, *args, **kwargs)
        old, size = self.boundary_head.decoder, self.config.vocab_size
        if old.bias.shape[0] != size:
            new = nn.Linear(old.in_features, size, device=old.weight.device, dtype=old.weight.dtype)
            self._init_weights(new)
            with torch.no_grad():
                kept = min(size, old.bias.shape[0])
                new.weight[:kept], new.bias[:kept] = old.weight[:kept], old.bias[:kept]
            self.boundary_head.decoder = new
            self.tie_weights()
        return table

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        span_boundaries: Tensor | None = None,
        span_target_places: Tensor | None = None,
        span_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerSpanBoundaryOutput:
        """labels: [B, T] as in masked LM. For P tokens of spans per row: span_boundaries [B, P, 2], where the tokens
        before and behind its span stand in the row; span_target_places [B, P], its number within the span;
        span_labels [B, P], its id (-100: none). logits: [B, T, V]; span_logits: [B, P, V]."""
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        states = base.last_hidden_state
        logits = self.lm_head(states)
        check_token_labels(labels, logits)
        aux_losses, span_logits = dict(base.aux_losses or {}), None
        if span_boundaries is not None and span_target_places is not None:
            span_logits = self._from_boundaries(states, span_boundaries, span_target_places)
            if span_labels is not None:
                check_token_labels(span_labels, span_logits, "span_labels")
                aux_losses["span_boundary"] = self.settings.weight * token_cross_entropy(span_logits, span_labels)
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        return outputs.XFormerSpanBoundaryOutput(
            loss=self.with_aux_losses(loss, base, aux_losses=aux_losses, share=step_share(labels, count)),
            logits=logits,
            span_logits=span_logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(aux_losses or None, loss),
            segment_memory=base.segment_memory,
        )

    def _from_boundaries(self, states: Tensor, boundaries: Tensor, places: Tensor) -> Tensor:
        if boundaries.shape != (*places.shape, 2):
            raise ValueError(
                f"`span_boundaries` {list(boundaries.shape)} do not belong to `span_target_places`"
                f" {list(places.shape)}; give two places of the row for each token of a span."
            )
        index = boundaries.to(states.device).clamp(min=0, max=states.shape[1] - 1)
        index = index.flatten(1).unsqueeze(-1).expand(-1, -1, states.shape[-1])
        left, right = states.gather(1, index).unflatten(1, (-1, 2)).unbind(2)
        most = self.boundary_head.places.num_embeddings - 1
        return self.boundary_head(left, right, places.to(states.device).clamp(min=0, max=most))
