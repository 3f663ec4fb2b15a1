# SPDX-License-Identifier: Apache-2.0
"""Classifiers: of texts, of their tokens, of spans of them and of choices. Each class says which shape it needs."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import can_return_tuple

from ..attention.shared.multihead_block import MultiheadPooling
from ..compat import CACHE
from ..configuration_xformer import XFormerConfig
from ..core import outputs
from ..core.choices import rows_of_mean, token_rows
from ..core.hand_overs import HandOver
from ..core.head_names import LABEL_HEADS
from ..core.inputs import check_token_labels
from ..core.losses import answer_cross_entropy, class_loss, counted_of, per_target, step_share, token_cross_entropy
from ..core.pooling import fitting, pool
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel
from .classifier_transform import build_transform
from .crf import LinearChainCRF
from .label_layer import LabelLayer
from .told_adapters import TellsAdapters


@runtime_checkable
class ChoosesInputs(Protocol):
    """An attention that chooses model inputs for a task where the caller does not."""

    def task_inputs(self, task: str, config: Any, input_ids: Tensor | None, mask: Tensor) -> dict[str, Any]:
        """mask: [B, T], True = real."""


class Classifier(TellsAdapters, XFormerPreTrainedModel):
    """A base model and a linear classifier, with a hidden layer before the labels where the config says so
    (`classifier_transform`). An encoder-decoder reads the input on both sides and classifies the decoder's states, as
    BART does."""

    reads_pooler = True
    # Losses that are means over rows, whatever else `forward` takes: Trainer has to divide them by accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config: XFormerConfig, num_outputs: int):
        super().__init__(config)
        self.num_labels = cast(int, config.num_labels)
        if HandOver.SERIES in config.embedding.gives:
            raise ValueError(
                f"{type(self).__name__} reads words, and embedding {config.embedding.type!r} numbers; use the class"
                " ...ForTimeSeriesPrediction, or embedding 'token'."
            )
        if config.is_decoder and config.classifier_pooling == "first" and not self.reads_every_token:
            raise ValueError(
                "`classifier_pooling='first'` would classify a text by its first token, and the decoder of "
                f"{type(self).__name__} lets that read nothing else; take 'last' (what 'auto' does) or 'mean'."
            )
        self.model = XFormerModel(config, add_pooling_layer=self.reads_pooler)
        self.model.under_a_head = True
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.transform = build_transform(config)
        self.pooling: MultiheadPooling | None = None
        if config.classifier_pooling == "attention" and self.model.pooler is None and not self.reads_every_token:
            self.pooling = MultiheadPooling(config)
        self.dropout = nn.Dropout(rate)
        width = self.model.vector_width if self.pooling is None else config.hidden_size
        self.classifier = LabelLayer(width, num_outputs)
        self.post_init()

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """The layer of labels begins anew where a checkpoint is of another head, whose layer has the same name and, by
        chance, the same size."""
        saved = next(iter(self.config.architectures or ()), "")
        head = next((head for head in LABEL_HEADS if saved.endswith(head)), "")
        other = not any(owner.__name__.endswith(head) for owner in type(self).__mro__)
        if other and isinstance(self.classifier, LabelLayer):  # quantized ones are loaded as they are
            self.classifier.resize(self.classifier.out_features)
            self._init_weights(self.classifier)
            loading_info.missing_keys |= {"classifier.weight", "classifier.bias"}
        super()._adjust_missing_and_unexpected_keys(loading_info)

    def transformed(self, states: Tensor) -> Tensor:
        """[..., D] -> what the labels are read off, [..., D]."""
        return states if self.transform is None else self.transform(states)

    def pooled(self, base, attention_mask: Tensor | None) -> Tensor:
        """[B, D]: what the transform makes of the pooler's vector where the model has a pooler, else of that by
        `classifier_pooling`."""
        single = isinstance(base, outputs.XFormerModelOutput)
        if single and base.pooler_output is not None:
            return self.transformed(base.pooler_output)
        how = self.config.classifier_pooling
        if how == "auto":
            how = "last" if self.config.is_decoder or self.config.is_encoder_decoder else "first"
        hidden_states = base.last_hidden_state
        attention_mask = fitting(attention_mask, hidden_states, base.padding_mask if single else None)
        if self.pooling is not None:
            real = None if attention_mask is None else attention_mask.to(hidden_states.device).bool()
            return self.transformed(self.pooling(hidden_states, real))
        if how == "late_mean":
            return pool(self.transformed(hidden_states), attention_mask, "mean")
        return self.transformed(pool(hidden_states, attention_mask, how))

    def task_inputs(
        self, task: str, given: dict[str, Any], input_ids: Tensor | None, embeds: Tensor | None, mask: Tensor | None
    ) -> dict[str, Any]:
        """`given` (keyword arguments) and what attention of this model chooses for a task where it was not given
        ([`ChoosesInputs`]), e.g. which tokens are global."""
        tokens = input_ids if input_ids is not None else embeds
        if tokens is None or not self.model.trunk.extra_inputs:
            return given
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        real = real if mask is None or mask.ndim != 2 else mask.bool()
        for layer in self.model.trunk.config.layer_configs():
            attention = layer.attention
            chosen = isinstance(attention, ChoosesInputs) and attention.task_inputs(task, layer, input_ids, real)
            if chosen and all(given.get(name) is None for name in chosen):
                return {**given, **chosen}
        return given

    @classmethod
    def refuse_two_towers(cls, config) -> None:
        """For tasks that read one sequence once."""
        if config.is_encoder_decoder:
            raise ValueError(
                f"{cls.__name__} reads one sequence; build it from a config with `is_encoder_decoder=False` (the"
                " encoder of a checkpoint loads into it)."
            )

    def recorded(self, base, loss: Tensor | None) -> dict[str, Any]:
        """What a head's output repeats of the base model's, under the base model's names."""
        single = ("hidden_states", "attentions", "segment_memory")
        double = (
            CACHE,
            "decoder_hidden_states",
            "decoder_attentions",
            "cross_attentions",
            "encoder_last_hidden_state",
            "encoder_hidden_states",
            "encoder_attentions",
        )
        names = double if isinstance(base, outputs.XFormerSeq2SeqModelOutput) else single
        return {**{name: getattr(base, name) for name in names}, "aux_losses": self.reported(base.aux_losses, loss)}


class XFormerForSequenceClassification(Classifier):
    """Classification or regression of whole texts."""

    def __init__(self, config: XFormerConfig):
        super().__init__(config, cast(int, config.num_labels))
        self.exits = config.stack.build_exits(config) if config.stack.exits == "texts" else None
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
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerSequenceClassifierOutput:
        """labels: [B] class ids, [B] or [B, num_labels] numbers (regression), or [B, num_labels] 0/1 (multi-label).
        logits: [B, num_labels]."""
        attention_mask = self.real_tokens(input_ids, attention_mask)
        if self.exits is not None:
            inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
            inputs |= {"token_type_ids": token_type_ids, "inputs_embeds": inputs_embeds}
            inputs |= {"past_key_values": past_key_values, "position_ids": position_ids}
            return self.exits.classify(self, labels, {**inputs, **kwargs})
        kwargs = self.task_inputs("sequence_classification", kwargs, input_ids, inputs_embeds, attention_mask)
        base = self.model(
            past_key_values=past_key_values,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **_decoder_inputs(decoder_input_ids, decoder_attention_mask),
            **kwargs,
        )
        given = (decoder_input_ids, decoder_attention_mask, kwargs.get("decoder_inputs_embeds"))
        mask = attention_mask if all(one is None for one in given) else decoder_attention_mask
        logits = self.classifier(self.dropout(self.pooled(base, mask)))
        loss, rows = None, None
        if labels is not None:
            loss = class_loss(self, labels, logits)
            rows = partial(rows_of_mean, partial(class_loss, self), logits, labels)
        recorded = self.recorded(base, loss)
        kind: Any = outputs.XFormerSequenceClassifierOutput
        if self.config.is_encoder_decoder:
            kind = outputs.XFormerSeq2SeqSequenceClassifierOutput
        return kind(loss=self.with_aux_losses(loss, base, rows), logits=logits, **recorded)


class XFormerForTokenClassification(Classifier):
    """Classification of every token, by itself or, with `tag_decoder="crf"`, in sequences of tags that fit together
    (LinearChainCRF)."""

    reads_pooler = False
    reads_every_token = True
    accepts_loss_kwargs = True  # `num_items_in_batch`

    def __init__(self, config: XFormerConfig):
        self.refuse_two_towers(config)
        super().__init__(config, cast(int, config.num_labels))
        self.crf: LinearChainCRF | None = None
        if config.tag_decoder == "crf":
            names = [str(name) for _, name in sorted(cast(dict, config.id2label).items())]
            self.crf = LinearChainCRF(names)
        self.exits = config.stack.build_exits(config) if config.stack.exits == "tokens" else None
        self.model.trunk.reads_tokens_alone = self.crf is None
        if self.crf is not None or self.exits is not None:
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
        tag_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerTokenClassifierOutput:
        """labels: [B, T] class ids, -100 where a token has none. logits: [B, T, num_labels].

        With a CRF or exits inside the stack, tag_mask [B, T] says which tokens have a tag (the first piece of every
        word, say); without it those with a label, or, without labels, real tokens but for `bos_token_id` and
        `eos_token_id`. In evaluation mode logits of a CRF say how much worse the best sequence with a tag is than the
        best of all, so that the largest ones are that sequence; in training mode they are scores of single tags.
        """
        count = kwargs.pop("num_items_in_batch", None)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "past_key_values": past_key_values,
        }
        if self.exits is not None:
            given = input_ids if input_ids is not None else inputs_embeds
            tagged = (
                None if given is None else self.tagged(given[..., None], input_ids, attention_mask, None, tag_mask)
            )
            return self.exits.classify(self, labels, tagged, {**inputs, **kwargs}, count)
        base = self.model(**inputs, **kwargs)
        logits = self.classifier(self.dropout(self.transformed(base.last_hidden_state)))
        check_token_labels(labels, logits)
        rows = None
        if self.crf is None:
            loss = None if labels is None else token_cross_entropy(logits, labels, count)
            rows = partial(token_rows, logits, labels, count)
        else:
            tagged = self.tagged(logits, input_ids, attention_mask, labels, tag_mask)
            if labels is not None:
                given, labels = labels, labels.masked_fill(~tagged.to(labels.device), -100)
                count = counted_of(labels, given, count, logits.dtype)
            loss, logits = self.in_sequence(self.crf, logits, labels, tagged, count)
        recorded = self.recorded(base, loss)
        return outputs.XFormerTokenClassifierOutput(
            loss=self.with_aux_losses(loss, base, rows, share=step_share(labels, count)), logits=logits, **recorded
        )

    def tagged(
        self,
        logits: Tensor,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        tag_mask: Tensor | None,
    ) -> Tensor:
        """[B, T] boolean: which tokens have a tag."""
        if tag_mask is not None:
            check_token_labels(tag_mask, logits, "tag_mask")
            tagged = tag_mask.to(logits.device).bool()
            return tagged if labels is None else tagged & (labels.to(logits.device) != -100)
        if labels is not None:
            return labels.to(logits.device) != -100
        tagged = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        if attention_mask is not None and attention_mask.ndim == 2:
            tagged = attention_mask.to(logits.device).bool()
        if input_ids is not None:
            for special in (self.config.bos_token_id, self.config.eos_token_id):
                for one in special if isinstance(special, list) else [special]:
                    tagged = tagged if one is None else tagged & (input_ids.to(logits.device) != one)
        return tagged

    def in_sequence(
        self, crf: LinearChainCRF, logits: Tensor, labels: Tensor | None, tagged: Tensor, count: Tensor | int | None
    ) -> tuple[Tensor | None, Tensor]:
        """The loss per tag (nats) of the chain over the tokens `tagged` [B, T], and the logits to give out."""
        loss = None
        if labels is not None:
            total = crf(logits, labels.to(logits.device), tagged).sum()
            loss = per_target(total, tagged.sum() if count is None else count)
        if not self.training:
            single = logits - logits.amax(-1, keepdim=True)
            logits = torch.where(tagged[..., None], crf.best(logits, tagged)[1].to(logits.dtype), single)
        return loss, logits


class XFormerForQuestionAnswering(Classifier):
    """Extractive question answering: where the answer starts and ends."""

    reads_pooler = False
    reads_every_token = True

    def __init__(self, config: XFormerConfig):
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
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> outputs.XFormerQuestionAnsweringOutput:
        """start_positions, end_positions: [B] token indices; one beyond the text is ignored. Logits: [B, T] each."""
        kwargs = self.task_inputs("question_answering", kwargs, input_ids, inputs_embeds, attention_mask)
        base = self.model(
            past_key_values=past_key_values,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **_decoder_inputs(decoder_input_ids, decoder_attention_mask),
            **kwargs,
        )
        start_logits, end_logits = self.classifier(self.dropout(self.transformed(base.last_hidden_state))).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = answer_cross_entropy(start_logits, end_logits, start_positions, end_positions)
        recorded = self.recorded(base, loss)
        kind: Any = outputs.XFormerQuestionAnsweringOutput
        if self.config.is_encoder_decoder:
            kind = outputs.XFormerSeq2SeqQuestionAnsweringOutput
        return kind(
            loss=self.with_aux_losses(loss, base),
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            **recorded,
        )


class XFormerForMultipleChoice(Classifier):
    """Choice among several continuations of one text."""

    def __init__(self, config: XFormerConfig):
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

        ids, embeds = rows(input_ids), rows(inputs_embeds)
        mask = self.real_tokens(ids, rows(attention_mask))
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
        loss = None if labels is None else token_cross_entropy(logits, labels)
        recorded = self.recorded(base, loss)
        return outputs.XFormerMultipleChoiceOutput(loss=self.with_aux_losses(loss, base), logits=logits, **recorded)


def _decoder_inputs(ids: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {name: value for name, value in given.items() if value is not None}
