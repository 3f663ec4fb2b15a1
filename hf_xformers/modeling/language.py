# SPDX-License-Identifier: Apache-2.0
"""Language models: masked, causal and sequence to sequence. Each class says which shape (encoder, causal decoder,
encoder-decoder) it needs."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import can_return_tuple

from ..compat import CACHE, one_cache, slice_logits_to_keep
from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.call import check_axes
from ..core.call_readers import sharding_in_force
from ..core.choices import token_rows
from ..core.inputs import check_token_labels
from ..core.losses import counted_after_real_tokens, next_token_cross_entropy, step_share, token_cross_entropy
from ..core.paging import PagedTexts
from ..core.sequence_parallel import next_tokens
from ..core.text_parts import division_in_force
from .generation import GenerativeModel
from .language_model import LanguageModel


class XFormerForMaskedLM(LanguageModel):
    """An encoder that predicts masked tokens."""

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False))
        self.model.trunk.reads_tokens_alone = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerMaskedLMOutput:
        """labels: [B, T], the original id where a token is to be predicted, -100 elsewhere. logits: [B, T, V]."""
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.lm_head(base.last_hidden_state)
        loss = None if labels is None else self.labelled_loss(base, logits, labels, count)
        return outputs.XFormerMaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
        )


class XFormerForCausalLM(GenerativeModel):
    """A decoder that predicts the next token."""

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=True, is_encoder_decoder=False))
        self.model.trunk.reads_tokens_alone = True

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        if any(key.startswith("model.decoder.") for key in loading_info.unexpected_keys):
            raise ValueError(
                f"The checkpoint is an encoder-decoder, of which {type(self).__name__} would read the encoder as if it"
                " were a decoder; load it with `AutoModelForSeq2SeqLM` (lm-eval: `backend='seq2seq'`)."
            )
        super()._adjust_missing_and_unexpected_keys(loading_info)

    def further_losses(self, states: Tensor, labels: Tensor, text: dict[str, Tensor | None]) -> dict[str, Tensor]:
        """Auxiliary losses of this head besides those of the model under it, by name. states: [B, T, D], the last
        ones; labels: [B, T]; text: `input_ids`, `inputs_embeds`, `attention_mask` and `position_ids`."""
        return {}

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerCausalLMOutput:
        """labels: [B, T] like `input_ids` (the shift is inside, but with `labels_in_place`), -100 where there is no
        target; a text's first token is none where padding stands before it. logits: [B, T, V], or of the last
        `logits_to_keep` positions. encoder_hidden_states: [B, M, D], with their encoder_attention_mask [B, M], what a
        decoder built with `add_cross_attention` reads besides."""
        memory = (("encoder_hidden_states", encoder_hidden_states), ("encoder_attention_mask", encoder_attention_mask))
        kwargs.update((name, value) for name, value in memory if value is not None)
        count, shift_labels = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
        past_key_values = one_cache(past_key_values, cache)
        if "cu_seq_lens_k" in kwargs:  # a step of continuous batching
            past_key_values = PagedTexts.of_step(past_key_values, kwargs)
        labeled = labels is not None or shift_labels is not None
        watch = self.exit_watch(labeled, kwargs)
        if isinstance(logits_to_keep, int) and logits_to_keep and not labeled:
            kwargs["logits_to_keep"] = logits_to_keep  # layers that only read may run on these tokens alone
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(base.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            text = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
            text |= {"attention_mask": attention_mask, "position_ids": position_ids}
            further = self.further_losses(base.last_hidden_state, labels, text)
            base.aux_losses = {**(base.aux_losses or {}), **further} or None
        if labeled:
            loss = self._causal_loss(base, logits, labels, shift_labels, attention_mask, count, watch)
        return outputs.XFormerCausalLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(base, CACHE)},
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            cross_attentions=base.cross_attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
            exit_layers=None if watch is None else watch.exit_layers(),
        )

    def _causal_loss(
        self,
        base: Any,
        logits: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        attention_mask: Tensor | None,
        count: Tensor | int | None,
        watch: Any,
    ) -> Tensor:
        """The loss of next tokens, and what `base` adds to it. shift_labels: each token's own target, where the caller
        has shifted them."""
        check_token_labels(labels, logits)
        if self.config.labels_in_place and shift_labels is None:
            shift_labels = labels
        division = division_in_force()
        if division is not None and labels is not None and shift_labels is None:
            shift_labels = next_tokens(labels, attention_mask, division)
        targets, shifted = shift_labels, False
        if shift_labels is not None:
            loss = token_cross_entropy(logits, shift_labels, count)
        else:
            if sharding_in_force():
                raise ValueError(
                    "Under context parallelism the next token may be in another process; give `shift_labels`, the"
                    " labels shifted by one before they are divided like `input_ids`."
                )
            labels, count = counted_after_real_tokens(logits, cast(Tensor, labels), attention_mask, count)
            loss = next_token_cross_entropy(logits, labels, count)
            targets, shifted = labels, True
        if watch is not None and watch.learns:
            own = nn.functional.pad(labels[:, 1:], (0, 1), value=-100) if shifted and labels is not None else targets
            loss = self.exits.loss(self, watch, logits, own, count)
        rows = partial(token_rows, logits, targets, count, shifted=shifted)
        share = step_share(targets, count, shifted=shifted)
        return cast(Tensor, self.with_aux_losses(loss, base, rows, share=share))


class XFormerForSeq2SeqLM(GenerativeModel):
    """An encoder-decoder that predicts a target text."""

    def __init__(self, config: XFormerConfig):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=True))

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """[B, T] labels (-100: padding) -> decoder inputs [B, T], for data collators."""
        return self.model.shift_right(labels)

    def _read_late(
        self, labels: Tensor, decoder_input_ids: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The decoder's inputs and mask for `labels`. Padding of the labels is padding of the inputs made of them, by
        this model or by a data collator beforehand; rows of other inputs are taken as they are."""
        read = self.model.read_from_labels(labels) if mask is None else mask
        if decoder_input_ids is None:
            return self.model.shift_right(labels), read
        if mask is None and decoder_input_ids.shape == labels.shape and self.config.decoder_start_token_id is not None:
            mask = read | (decoder_input_ids != self.model.shift_right(labels)).any(-1, keepdim=True)
        return decoder_input_ids, mask

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: Any | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerSeq2SeqLMOutput:
        """labels: [B, T_target] ids, -100 where there is no target; the decoder reads them shifted right. logits:
        [B, T_target, V]."""
        count = kwargs.pop("num_items_in_batch", None)
        watch = self.exit_watch(labels is not None, kwargs)
        check_axes("labels", labels)
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_inputs_embeds is None:
                decoder_input_ids, decoder_attention_mask = self._read_late(
                    labels, decoder_input_ids, decoder_attention_mask
                )
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=encoder_outputs,
            past_key_values=one_cache(past_key_values, cache),
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(base.last_hidden_state, logits_to_keep))
        loss = None if labels is None else self.labelled_loss(base, logits, labels, count, watch)
        return outputs.XFormerSeq2SeqLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(base, CACHE)},
            decoder_hidden_states=base.decoder_hidden_states,
            decoder_attentions=base.decoder_attentions,
            cross_attentions=base.cross_attentions,
            encoder_last_hidden_state=base.encoder_last_hidden_state,
            encoder_hidden_states=base.encoder_hidden_states,
            encoder_attentions=base.encoder_attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
            exit_layers=None if watch is None else watch.exit_layers(),
        )
