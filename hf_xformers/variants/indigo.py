# SPDX-License-Identifier: Apache-2.0
"""InDIGO (Gu et al. 2019): decoding by insertion, with positions known only relative to each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import can_return_tuple

from ..auto_classes import register_model
from ..compat import CACHE, one_cache, slice_logits_to_keep
from ..configuration_xformer import Initializer, XFormerConfig
from ..core.components import SpecLike, preset
from ..core.evaluating import evaluating
from ..core.losses import counted_after_real_tokens, step_share, token_cross_entropy
from ..core.outputs import XFormerCausalLMOutput
from ..embedding.token import stored_vectors
from ..families import DECODER_HEADS, VariantInfo, make_family
from ..heads.insertion import InsertionHead, place_log_likelihood
from ..modeling.insertion import insert_words, search_orders
from ..ops.common.real_tokens import real_places


class XFIndigoConfig(XFormerConfig):
    """InDIGO (Gu et al. 2019): decoding by insertion, with positions known only relative to each other."""

    model_type = "xf_indigo"

    hidden_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    intermediate_size: int = 2048
    layer_norm_eps: float = 1e-6
    initializer: Initializer = "xavier"
    embedding: SpecLike = preset({"type": "token", "scale": True})
    is_decoder: bool = True
    position: SpecLike = "indigo"
    attention: SpecLike = preset({"type": "dense", "bias": False})
    feedforward: SpecLike = "relu"
    head: SpecLike = "insertion"


INFO = VariantInfo(
    section="5.1",
    summary="tokens in the order of their generation; a key stands left or right of the query, no more is known",
    paper="Gu et al. 2019",
    url="https://arxiv.org/abs/1902.01370",
    equation=r"\frac{q_i (k_j + a_{r_{ij}})^\top}{\sqrt d}, \qquad r_{ij} = \mathrm{sign}(z_i - z_j)",
    cost="time O(T^2 D), memory O(T): scores are made in blocks of queries",
    cite="gu2019insertion",
    notes=(
        "`insertion_positions` [B, T] gives each token's place in the finished text; without it, the order is left to"
        " right. `pretrain --objective insertion` trains with any order, `--objective.order searched` with those that"
        " the model finds likeliest. `generate`, and all that is built on it, only appends words;"
        " `generate_by_insertion(input_ids)`, greedy, inserts them between two boundary tokens and the words given"
        " there."
    ),
)

_family = make_family(XFIndigoConfig, "XFIndigo", DECODER_HEADS, INFO)


_CausalLM: Any = _family["ForCausalLM"]


class XFIndigoForCausalLM(_CausalLM):
    """A decoder that inserts: it predicts the next word and where it stands. Loss: negative log likelihood of both."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        insertion_positions: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> XFormerCausalLMOutput:
        """insertion_positions: [B, T], the place in the finished text of each token (tokens come in the order of their
        generation); default: left to right. labels: [B, T] like `input_ids` (the shift is inside), -100 where there is
        no target."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "past_key_values": one_cache(past_key_values, cache),
            "use_cache": use_cache,
            "insertion_positions": insertion_positions,
        }
        targets: Any = kwargs.get("shift_labels")
        if (targets is None and labels is None) or not isinstance(self.lm_head, InsertionHead):
            return super().forward(**given, labels=labels, logits_to_keep=logits_to_keep, **kwargs)
        count, _ = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        base = self.model(**given, **kwargs)
        states = base.last_hidden_state
        logits = self.lm_head(states)
        if targets is None and labels is not None:
            labels, count = counted_after_real_tokens(logits, labels, attention_mask, count)
            targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        places = self._place_loss(states, targets, attention_mask, insertion_positions)
        losses, share = {**(base.aux_losses or {}), "place": places}, step_share(targets, count)
        return XFormerCausalLMOutput(
            loss=self.with_aux_losses(token_cross_entropy(logits, targets, count), base, None, losses, share),
            logits=slice_logits_to_keep(logits, logits_to_keep),
            **{CACHE: getattr(base, CACHE)},
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=losses,
        )

    def _place_loss(self, states: Tensor, targets: Tensor, mask: Tensor | None, places: Tensor | None) -> Tensor:
        """Mean over this batch's tokens with a target and a place of -log p(place). targets [B, T]: the next word of
        each; what follows the last token has no place yet."""
        batch, length = targets.shape
        if places is None:
            places = torch.arange(length, device=targets.device).expand(batch, -1)
        real = targets.new_ones(batch, length).bool() if mask is None else mask.bool()
        targets = targets[:, :-1].to(states.device)
        words = stored_vectors(self.get_input_embeddings(), targets.clamp(min=0)).to(states.dtype)
        pointer, left, right = self.lm_head.pointers(states)
        likelihood, has_slot = place_log_likelihood(pointer, words, left, right, places, real)
        counted = (targets != -100) & has_slot
        total = -(likelihood * counted).sum()
        return total / counted.sum().clamp(min=1)

    @torch.no_grad()
    def generate_by_insertion(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int = 50,
        eos_token_id: int | Sequence[int] | None = None,
        **unused: Any,
    ) -> Tensor:
        """Greedy decoding by insertion: the likeliest word, then the likeliest slot for it, and so on.

        input_ids: [B, T], texts between their boundary tokens, as `[CLS] ... [SEP]`; words that stand there are given,
        and the others are inserted between and around them. attention_mask: [B, T], padding on either side.
        eos_token_id: what ends a row when it is predicted, and is not inserted (default: the config's). Returns the
        finished texts [B, length], boundaries included, padded on the right; what a tokenizer makes besides ids and
        mask is not read.

        Raises:
            ValueError: a row without both boundaries, or a head that does not insert.
        """
        if not isinstance(self.lm_head, InsertionHead):
            raise ValueError(
                f"head {self.config.head.type!r} does not say where words are inserted; take head 'insertion', or"
                " `generate`, which appends them."
            )
        real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        if input_ids.ndim != 2 or bool((real.sum(-1) < 2).any()):
            raise ValueError(
                f"`input_ids` {list(input_ids.shape)} holds a left and a right boundary token in each row at least,"
                " [B, T]; put them around the text."
            )
        rows = [ids[keep] for ids, keep in zip(input_ids, real)]
        rows = [torch.cat((ids[:1], ids[-1:], ids[1:-1])) for ids in rows]
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(ids) for ids in rows], True, 0, "left").bool()
        ends = self.config.eos_token_id if eos_token_id is None else eos_token_id
        ends = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
        texts = insert_words(self, nn.utils.rnn.pad_sequence(rows, True, 0, "left"), mask, max_new_tokens, ends)
        nothing = self.config.pad_token_id
        nothing = nothing if nothing is not None else ends[0] if ends else 0
        made = [torch.tensor(text, device=input_ids.device) for text in texts]
        return nn.utils.rnn.pad_sequence(made, True, nothing)

    def insert_tokens(
        self, input_ids: Tensor, max_new_tokens: int, eos_token_id: int | None = None
    ) -> list[list[int]]:
        """[`generate_by_insertion`] from nothing: input_ids [B, 2], the tokens that bound the text on the left and on
        the right, -> the tokens of each row in text order, without the boundaries."""
        if input_ids.ndim != 2 or input_ids.shape[1] != 2:
            raise ValueError(
                f"`input_ids` holds the two boundary tokens of each row, [B, 2], got {list(input_ids.shape)}."
            )
        eos = self.config.eos_token_id if eos_token_id is None else eos_token_id
        ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        texts = insert_words(self, input_ids, torch.ones_like(input_ids).bool(), max_new_tokens, ends)
        return [text[1:-1] for text in texts]

    def prepare_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of the objective `insertion`; where its orders are to be searched, they are put in their place: one
        of the beam, drawn, in training (section 3.3), the likeliest otherwise."""
        beam = batch.get("order_beam")
        if beam is None:
            return batch
        batch = {key: value for key, value in batch.items() if key != "order_beam"}
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        lengths, most = mask.sum(-1) - 3, int(mask.sum(-1).max()) - 3
        if most < 1:
            return batch
        number = real_places(mask)
        column = torch.arange(most, device=ids.device)
        start = (number == 2).int().argmax(-1, keepdim=True)  # padding on either side
        at = (start + column).clamp(max=ids.shape[1] - 1)
        real = column < lengths[:, None]
        bounds = ids.gather(1, start - 2 + torch.arange(2, device=ids.device))
        with evaluating(self):
            orders, likelihood = search_orders(self, ids.gather(1, at), lengths, bounds, int(beam[0]))
        row = torch.zeros_like(lengths)
        if self.training:
            row = likelihood.isfinite().float().multinomial(1)[:, 0]
        order = orders[torch.arange(len(ids), device=ids.device), row]
        source = torch.where(real, start + order, at)
        for name in ("input_ids", "labels", "insertion_positions"):
            values = batch[name].clone()
            rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(at)
            values[rows[real], at[real]] = batch[name].gather(1, source)[real]
            batch[name] = values
        return batch


register_model("AutoModelForCausalLM", XFIndigoConfig, XFIndigoForCausalLM)
