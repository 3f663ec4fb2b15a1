"""Models with a head. Each head class says which shape (encoder, causal decoder, encoder-decoder) it needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple, logging

from . import modeling_outputs as outputs
from .cache import make_cache, stateful_part
from .losses import next_token_cross_entropy, token_cross_entropy, with_aux_losses
from .modeling_xformer import XFormerModel, XFormerPreTrainedModel, layer_configs

logger = logging.get_logger(__name__)


class _LanguageModel(XFormerPreTrainedModel):
    """A base model and a vocabulary head, tied to the token table unless the config unties it."""

    reads_pooler = False

    def __init__(self, config):
        super().__init__(config)
        self.model = XFormerModel(config, add_pooler=self.reads_pooler)
        self.model.under_a_head = True
        self.lm_head = config.head.build(config)
        self._tied_weights_keys = {"lm_head.decoder.weight": "model.trunk.embedding.tokens.weight"}
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head.decoder

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head.decoder = value

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        return self.model.get_encoder(modality)

    def get_decoder(self) -> nn.Module:
        return self.model.get_decoder()


class _Generative(_LanguageModel, GenerationMixin):
    """Generation with the cache that the config's mechanisms declare."""

    def __init__(self, config):
        super().__init__(config)
        # A state that cannot forget its last tokens: transformers then refuses to decode with an assistant.
        self._is_stateful = not make_cache(config).is_croppable

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        tower = self.config.tower("decoder") if self.config.is_encoder_decoder else self.config
        for index in range(tower.num_hidden_layers):
            if reason := tower.layer(index).attention.why_not_generate():
                raise ValueError(reason)
        given = model_kwargs.get("past_key_values") is not None
        # The other implementations hold keys and values, which a stateful mechanism has not.
        ours = generation_config.cache_implementation in (None, "dynamic") or self._is_stateful
        if not given and generation_config.use_cache is not False and ours:
            model_kwargs["past_key_values"] = make_cache(self.config)
            if generation_config.cache_implementation not in (None, "dynamic"):
                logger.warning_once(
                    f"`cache_implementation={generation_config.cache_implementation!r}` holds keys and values, but "
                    f"{stateful_part(tower)} keeps another state; generating with its own cache."
                )
            return
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return True  # transformers goes by the class's name, and its own Reformer keeps another kind of cache

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        # Inputs that a component asks for are in no signature, where transformers looks for typos.
        known = self.model.trunk.extra_inputs
        super()._validate_model_kwargs({name: value for name, value in model_kwargs.items() if name not in known})

    def _expand_inputs_for_generation(self, expand_size: int = 1, **kwargs: Any) -> Any:
        # transformers repeats tensors for beams; a segment memory is an object of several.
        carried = kwargs.pop("segment_memory", None)
        input_ids, inputs = super()._expand_inputs_for_generation(expand_size=expand_size, **kwargs)
        if carried is not None:
            inputs["segment_memory"] = carried.repeat_interleave(expand_size)
        return input_ids, inputs


class XFormerForMaskedLM(_LanguageModel):
    """An encoder that predicts masked tokens."""

    def __init__(self, config):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False))

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
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        return outputs.XFormerMaskedLMOutput(
            loss=with_aux_losses(loss, base.aux_losses),
            logits=logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
        )


class XFormerForCausalLM(_Generative):
    """A decoder that predicts the next token."""

    def __init__(self, config):
        super().__init__(self.shaped(config, is_decoder=True, is_encoder_decoder=False))

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
        **kwargs: Any,
    ) -> outputs.XFormerCausalLMOutput:
        """labels: [B, T] like `input_ids` (the shift is inside), -100 where there is no target. logits: [B, T, V], or of
        the last `logits_to_keep` positions."""
        count, shift_labels = kwargs.pop("num_items_in_batch", None), kwargs.pop("shift_labels", None)
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
        if shift_labels is not None:  # the caller shifted already (sequence parallelism): position t's own target
            loss = token_cross_entropy(logits, shift_labels, count)
        elif labels is not None:
            loss = next_token_cross_entropy(logits, labels, count)
        return outputs.XFormerCausalLMOutput(
            loss=with_aux_losses(loss, base.aux_losses),
            logits=logits,
            past_key_values=base.past_key_values,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
            segment_memory=base.segment_memory,
        )


class XFormerForSeq2SeqLM(_Generative):
    """An encoder-decoder that predicts a target text."""

    def __init__(self, config):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=True))

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return self.model.shift_right(labels)

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
        **kwargs: Any,
    ) -> outputs.XFormerSeq2SeqLMOutput:
        """labels: [B, T_target] ids, -100 where there is no target; the decoder reads them shifted right. logits:
        [B, T_target, V]."""
        count = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            use_cache = False if use_cache is None else use_cache
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.model.shift_right(labels)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(base.last_hidden_state, logits_to_keep))
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        return outputs.XFormerSeq2SeqLMOutput(
            loss=with_aux_losses(loss, base.aux_losses),
            logits=logits,
            past_key_values=base.past_key_values,
            decoder_hidden_states=base.decoder_hidden_states,
            decoder_attentions=base.decoder_attentions,
            cross_attentions=base.cross_attentions,
            encoder_last_hidden_state=base.encoder_last_hidden_state,
            encoder_hidden_states=base.encoder_hidden_states,
            encoder_attentions=base.encoder_attentions,
            aux_losses=self.reported(base.aux_losses, loss),
        )


def pool(hidden_states: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """One vector per row: the `first`, the `mean` or the `last` real token. [B, T, D], mask [B, T] or None -> [B, D]."""
    if mask is None:
        if how == "mean":
            return hidden_states.mean(dim=1)
        return hidden_states[:, 0 if how == "first" else -1]
    mask = mask.to(hidden_states.device)
    if how == "mean":
        weights = mask.to(hidden_states.dtype).unsqueeze(-1)
        return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    order = torch.arange(mask.shape[1], device=mask.device)
    real = mask.bool()
    index = (
        torch.where(real, order, mask.shape[1]).amin(-1) if how == "first" else torch.where(real, order, -1).amax(-1)
    )
    index = index.clamp(0, mask.shape[1] - 1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=mask.device), index]


class _Classifier(XFormerPreTrainedModel):
    """A base model and a linear classifier. An encoder-decoder reads the input on both sides and classifies the decoder's
    states, as BART does."""

    reads_pooler = True
    # Losses that are means over rows, whatever else `forward` takes: Trainer has to divide them by accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config, num_outputs: int):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = XFormerModel(config, add_pooler=self.reads_pooler)
        self.model.under_a_head = True
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, num_outputs)
        self.post_init()

    def pooled(self, base, attention_mask: Tensor | None) -> Tensor:
        """[B, D]: the pooler's vector where the model has a pooler, else by `classifier_pooling`."""
        if getattr(base, "pooler_output", None) is not None:
            return base.pooler_output
        how = self.config.classifier_pooling
        if how == "auto":
            how = "last" if self.config.is_decoder or self.config.is_encoder_decoder else "first"
        hidden_states = base.last_hidden_state
        if attention_mask is not None and attention_mask.shape != hidden_states.shape[:2]:
            attention_mask = getattr(base, "padding_mask", None)
        return pool(hidden_states, attention_mask, how)

    def task_inputs(
        self, task: str, given: dict[str, Any], input_ids: Tensor | None, embeds: Tensor | None, mask: Tensor | None
    ) -> dict[str, Any]:
        """`given` (keyword arguments) and what attention of this model chooses for a task where it was not given: a spec's
        method `task_inputs`, e.g. which tokens are global."""
        if not self.model.trunk.extra_inputs:
            return given
        for layer in layer_configs(self.model.trunk.config):
            choose = getattr(layer.attention, "task_inputs", None)
            if choose is not None:
                shape = input_ids.shape if input_ids is not None else embeds.shape[:2]
                device = input_ids.device if input_ids is not None else embeds.device
                whole = torch.ones(shape, dtype=torch.bool, device=device)
                real = whole if mask is None or mask.ndim != 2 else mask.bool()
                chosen = choose(task, layer, input_ids, real)
                if all(given.get(name) is None for name in chosen):
                    return {**given, **chosen}
        return given

    @classmethod
    def refuse_two_towers(cls, config) -> None:
        """For tasks that read one sequence once."""
        if config.is_encoder_decoder:
            raise ValueError(
                f"{cls.__name__} reads one sequence; build it from a config with `is_encoder_decoder=False` (the encoder "
                "of a checkpoint loads into it)."
            )

    def recorded(self, base, loss: Tensor | None) -> dict[str, Any]:
        """What a head's output repeats of the base model's, under the base model's names."""
        single = ("hidden_states", "attentions", "segment_memory")
        double = (
            "past_key_values",
            "decoder_hidden_states",
            "decoder_attentions",
            "cross_attentions",
            "encoder_last_hidden_state",
            "encoder_hidden_states",
            "encoder_attentions",
        )
        names = double if hasattr(base, "encoder_last_hidden_state") else single
        return {**{name: getattr(base, name) for name in names}, "aux_losses": self.reported(base.aux_losses, loss)}


class XFormerForSequenceClassification(_Classifier):
    """Classification or regression of whole texts."""

    def __init__(self, config):
        super().__init__(config, config.num_labels)
        self.exits = config.stack.build_exits(config)
        if self.exits is not None:
            self.post_init()
            self.exits.freeze(self)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerSequenceClassifierOutput:
        """labels: [B] class ids, [B] or [B, num_labels] numbers (regression), or [B, num_labels] 0/1 (multi-label).
        logits: [B, num_labels]."""
        if self.exits is not None:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
            return self.exits.classify(self, labels, {**inputs, "inputs_embeds": inputs_embeds, **kwargs})
        kwargs = self.task_inputs("sequence_classification", kwargs, input_ids, inputs_embeds, attention_mask)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            **_decoder_inputs(decoder_input_ids, decoder_attention_mask),
            **kwargs,
        )
        mask = decoder_attention_mask if decoder_input_ids is not None else attention_mask
        logits = self.classifier(self.dropout(self.pooled(base, mask)))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        recorded = self.recorded(base, loss)
        kind = outputs.XFormerSequenceClassifierOutput
        if self.config.is_encoder_decoder:
            kind = outputs.XFormerSeq2SeqSequenceClassifierOutput
        return kind(loss=with_aux_losses(loss, base.aux_losses), logits=logits, **recorded)


class XFormerForTokenClassification(_Classifier):
    """Classification of every token."""

    reads_pooler = False
    accepts_loss_kwargs = True  # `num_items_in_batch`

    def __init__(self, config):
        self.refuse_two_towers(config)
        super().__init__(config, config.num_labels)

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
    ) -> outputs.XFormerTokenClassifierOutput:
        """labels: [B, T] class ids, -100 where a token has none. logits: [B, T, num_labels]."""
        count = kwargs.pop("num_items_in_batch", None)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.dropout(base.last_hidden_state))
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        recorded = self.recorded(base, loss)
        return outputs.XFormerTokenClassifierOutput(
            loss=with_aux_losses(loss, base.aux_losses), logits=logits, **recorded
        )


class XFormerForQuestionAnswering(_Classifier):
    """Extractive question answering: where the answer starts and ends."""

    reads_pooler = False

    def __init__(self, config):
        super().__init__(config, 2)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerQuestionAnsweringOutput:
        """start_positions, end_positions: [B] token indices; one beyond the text is ignored. Logits: [B, T] each."""
        kwargs = self.task_inputs("question_answering", kwargs, input_ids, inputs_embeds, attention_mask)
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
            **_decoder_inputs(decoder_input_ids, decoder_attention_mask),
            **kwargs,
        )
        start_logits, end_logits = self.classifier(self.dropout(base.last_hidden_state)).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        recorded = self.recorded(base, loss)
        kind = outputs.XFormerQuestionAnsweringOutput
        if self.config.is_encoder_decoder:
            kind = outputs.XFormerSeq2SeqQuestionAnsweringOutput
        return kind(
            loss=with_aux_losses(loss, base.aux_losses),
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            **recorded,
        )


class XFormerForMultipleChoice(_Classifier):
    """Choice among several continuations of one text."""

    def __init__(self, config):
        self.refuse_two_towers(config)
        super().__init__(config, 1)

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
    ) -> outputs.XFormerMultipleChoiceOutput:
        """input_ids: [B, choices, T] (masks alike); labels: [B] index of the right choice. logits: [B, choices]."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None or given.ndim < 3:
            raise ValueError(
                "Multiple choice takes `input_ids` [batch, choices, length] or `inputs_embeds` with one more axis."
            )
        choices = given.shape[1]

        def rows(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.flatten(0, 1)

        ids, embeds, mask = rows(input_ids), rows(inputs_embeds), rows(attention_mask)
        names = self.model.trunk.extra_inputs
        extra = {name: rows(kwargs.pop(name)) for name in names if isinstance(kwargs.get(name), Tensor)}
        base = self.model(
            input_ids=ids,
            attention_mask=mask,
            token_type_ids=rows(token_type_ids),
            position_ids=rows(position_ids),
            inputs_embeds=embeds,
            **self.task_inputs("multiple_choice", extra, ids, embeds, mask),
            **kwargs,
        )
        logits = self.classifier(self.dropout(self.pooled(base, mask))).view(-1, choices)
        loss = None if labels is None else F.cross_entropy(logits.float(), labels)
        recorded = self.recorded(base, loss)
        return outputs.XFormerMultipleChoiceOutput(
            loss=with_aux_losses(loss, base.aux_losses), logits=logits, **recorded
        )


class XFormerForNextSentencePrediction(_Classifier):
    """Two-way classification of a pair of texts: next sentence (BERT) or sentence order (ALBERT). Class 0: B follows A."""

    def __init__(self, config):
        super().__init__(self.shaped(config, is_decoder=False, is_encoder_decoder=False), 2)

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
    ) -> outputs.XFormerSentencePairOutput:
        """labels: [B], 0 = B follows A, 1 = it does not. logits: [B, 2]."""
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        logits = self.classifier(self.pooled(base, attention_mask))
        loss = None if labels is None else F.cross_entropy(logits.float(), labels.view(-1))
        recorded = self.recorded(base, loss)
        return outputs.XFormerSentencePairOutput(
            loss=with_aux_losses(loss, base.aux_losses), logits=logits, **recorded
        )


class XFormerForPreTraining(_LanguageModel):
    """BERT's two objectives at once: masked tokens, and a two-way label for the pair of texts."""

    reads_pooler = True

    def __init__(self, config):
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerForPreTrainingOutput:
        """labels: [B, T] as in masked LM; next_sentence_label: [B], 0 = B follows A. The loss is the sum of the two and is
        returned when both labels are given."""
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
        vector = base.pooler_output
        vector = pool(base.last_hidden_state, attention_mask, "first") if vector is None else vector
        pair_logits = self.classifier(vector)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = token_cross_entropy(logits, labels, count)
            loss = loss + F.cross_entropy(pair_logits.float(), next_sentence_label.view(-1))
        return outputs.XFormerForPreTrainingOutput(
            loss=with_aux_losses(loss, base.aux_losses),
            prediction_logits=logits,
            seq_relationship_logits=pair_logits,
            hidden_states=base.hidden_states,
            attentions=base.attentions,
            aux_losses=self.reported(base.aux_losses, loss),
        )


def _decoder_inputs(ids: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {name: value for name, value in given.items() if value is not None}
