"""Classifiers: of texts, of their tokens, of spans of them and of choices. Each class says which shape it needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils import can_return_tuple

from ..attention.shared.multihead_block import MultiheadPooling
from ..core import outputs
from ..core.inputs import check_token_labels
from ..core.losses import token_cross_entropy, with_aux_losses
from ..core.pooling import pool
from ..modeling_base import XFormerPreTrainedModel
from ..modeling_xformer import XFormerModel
from .classifier_transform import build_transform
from .label_layer import LabelLayer


class Classifier(XFormerPreTrainedModel):
    """A base model and a linear classifier, with a hidden layer before the labels where the config says so
    (`classifier_transform`). An encoder-decoder reads the input on both sides and classifies the decoder's states, as
    BART does."""

    reads_pooler = True
    # Losses that are means over rows, whatever else `forward` takes: Trainer has to divide them by accumulation steps.
    accepts_loss_kwargs = False

    def __init__(self, config, num_outputs: int):
        super().__init__(config)
        self.num_labels = config.num_labels
        if config.is_decoder and config.classifier_pooling == "first" and not self.reads_every_token:
            raise ValueError(
                "`classifier_pooling='first'` would classify a text by its first token, and the decoder of "
                f"{type(self).__name__} lets that read nothing else; take 'last' (what 'auto' does) or 'mean'."
            )
        self.model = XFormerModel(config, add_pooler=self.reads_pooler)
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
        if attention_mask is not None and attention_mask.shape != hidden_states.shape[:2]:
            attention_mask = base.padding_mask if single else None
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
        ([`AttentionSpec.task_inputs`]), e.g. which tokens are global."""
        tokens = input_ids if input_ids is not None else embeds
        if tokens is None or not self.model.trunk.extra_inputs:
            return given
        real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        real = real if mask is None or mask.ndim != 2 else mask.bool()
        for layer in self.model.trunk.config.layer_configs():
            chosen = layer.attention.task_inputs(task, layer, input_ids, real)
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
            "past_key_values",
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
        kind: Any = outputs.XFormerSequenceClassifierOutput
        if self.config.is_encoder_decoder:
            kind = outputs.XFormerSeq2SeqSequenceClassifierOutput
        return kind(loss=with_aux_losses(loss, base.aux_losses), logits=logits, **recorded)


class XFormerForTokenClassification(Classifier):
    """Classification of every token."""

    reads_pooler = False
    reads_every_token = True
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
        logits = self.classifier(self.dropout(self.transformed(base.last_hidden_state)))
        check_token_labels(labels, logits)
        loss = None if labels is None else token_cross_entropy(logits, labels, count)
        recorded = self.recorded(base, loss)
        return outputs.XFormerTokenClassifierOutput(
            loss=with_aux_losses(loss, base.aux_losses), logits=logits, **recorded
        )


class XFormerForQuestionAnswering(Classifier):
    """Extractive question answering: where the answer starts and ends."""

    reads_pooler = False
    reads_every_token = True

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
        start_logits, end_logits = self.classifier(self.dropout(self.transformed(base.last_hidden_state))).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        recorded = self.recorded(base, loss)
        kind: Any = outputs.XFormerQuestionAnsweringOutput
        if self.config.is_encoder_decoder:
            kind = outputs.XFormerSeq2SeqQuestionAnsweringOutput
        return kind(
            loss=with_aux_losses(loss, base.aux_losses),
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            **recorded,
        )


class XFormerForMultipleChoice(Classifier):
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


def _decoder_inputs(ids: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {name: value for name, value in given.items() if value is not None}
