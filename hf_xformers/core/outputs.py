# SPDX-License-Identifier: Apache-2.0
"""Outputs of transformers with one more field: the auxiliary losses collected inside the model, by name. They stand
next to a loss, and wherever gradients are recorded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import modeling_outputs as base
from transformers.utils import ModelOutput

from .prepared import State
from .segment_memory import SegmentMemory


class FieldsAtOnce:
    """Mixin, before an output of transformers that every decoding step makes: a field is set without listing all of
    them for each, which takes longer than some layers' arithmetic."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and name in self.__dataclass_fields__:
            OrderedDict.__setitem__(self, name, value)  # type: ignore[index]  # every output is one
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)  # a field's former name, too

    def __post_init__(self) -> None:
        # Fields are items already. ModelOutput treats a lone first field that is no tensor as the whole dictionary.
        first = getattr(self, next(iter(self.__dataclass_fields__)))
        if first is not None and not isinstance(first, torch.Tensor):
            super().__post_init__()  # type: ignore[misc]  # every output has one


@dataclass
class TowerOutput(FieldsAtOnce, base.BaseModelOutputWithPastAndCrossAttentions):
    """last_hidden_state [B, T, D]; padding_mask: boolean [B, T] that belongs to it (None: nothing is padded); memories
    [B, steps of the decoder, T, D]: what each decoder layer reads, from an encoder that gives them different ones (the
    batch comes first, so that beams expand it); segment_memory: what the next segment of the text may read of this
    one, from a stack with such a memory; text_state: what the last layer passed on and a pooler reads."""

    padding_mask: torch.Tensor | None = None
    aux_losses: dict[str, torch.Tensor] | None = None
    memories: torch.Tensor | None = None
    segment_memory: SegmentMemory | None = None
    text_state: State | None = None
    log_probs: torch.Tensor | None = None
    summaries: torch.Tensor | None = None


@dataclass
class XFormerModelOutput(FieldsAtOnce, base.BaseModelOutputWithPoolingAndCrossAttentions):
    """padding_mask: boolean [B, T'] that belongs to last_hidden_state, where its length is not the input's; log_probs
    [B]: of the choices that layers drew in training (`core/choices.py`); summaries [B, G, D]: the last states of
    global tokens that stand for parts of the text, where a stack has them."""

    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None
    padding_mask: torch.Tensor | None = None
    log_probs: torch.Tensor | None = None
    summaries: torch.Tensor | None = None


@dataclass
class XFormerSeq2SeqModelOutput(FieldsAtOnce, base.Seq2SeqModelOutput):
    """segment_memory: the encoder's; log_probs [B]: of the choices that layers of both towers drew in training."""

    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None
    log_probs: torch.Tensor | None = None


@dataclass
class XFormerMaskedLMOutput(base.MaskedLMOutput):
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerCausalLMOutput(FieldsAtOnce, base.CausalLMOutputWithCrossAttentions):
    """exit_layers [B, T]: the layer (1, 2, ...) after which each token left, where tokens may leave early."""

    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None
    exit_layers: torch.LongTensor | None = None


@dataclass
class XFormerSeq2SeqLMOutput(FieldsAtOnce, base.Seq2SeqLMOutput):
    """segment_memory: the encoder's. exit_layers [B, T]: the decoder's layer (1, 2, ...) after which each token left,
    where tokens may leave early."""

    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None
    exit_layers: torch.LongTensor | None = None


@dataclass
class XFormerSequenceClassifierOutput(base.SequenceClassifierOutput):
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerEarlyExitClassifierOutput(XFormerSequenceClassifierOutput):
    """exit_layers [B]: the layer (1, 2, ...) whose classifier gave each row's logits; None in training."""

    exit_layers: torch.LongTensor | None = None


@dataclass
class XFormerTokenClassifierOutput(base.TokenClassifierOutput):
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerReplacedTokenOutput(XFormerTokenClassifierOutput):
    """targets [B, T]: what the model itself made the logits' labels, -100 for none."""

    targets: torch.Tensor | None = None


@dataclass
class XFormerEarlyExitTokenOutput(XFormerTokenClassifierOutput):
    """exit_layers [B, T]: the layer (1, 2, ...) whose classifier gave each token's logits; None in training."""

    exit_layers: torch.LongTensor | None = None


@dataclass
class XFormerQuestionAnsweringOutput(base.QuestionAnsweringModelOutput):
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerMultipleChoiceOutput(base.MultipleChoiceModelOutput):
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerSentencePairOutput(base.NextSentencePredictorOutput):
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerForPreTrainingOutput(ModelOutput):
    """loss: masked LM + sentence pair (+ auxiliary); prediction_logits [B, T, V]; seq_relationship_logits [B, 2]."""

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: tuple[torch.FloatTensor] | None = None
    attentions: tuple[torch.FloatTensor] | None = None
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerBidirectionalLMOutput(XFormerMaskedLMOutput):
    """logits [B, T, 2, V]: of the next token, and of the one before; features [B, T, 2 D]: both directions' states
    side by side; targets [B, T, 2]. hidden_states and attentions are of the direction that reads from the
    beginning."""

    features: torch.Tensor | None = None
    targets: torch.Tensor | None = None


@dataclass
class XFormerSpanBoundaryOutput(XFormerMaskedLMOutput):
    """span_logits [B, P, V]: of the tokens of spans, from the states around them."""

    span_logits: torch.Tensor | None = None


@dataclass
class XFormerEntityReplacementOutput(XFormerMaskedLMOutput):
    """entity_logits [B, M]: positive where a name seems to be replaced."""

    entity_logits: torch.Tensor | None = None


@dataclass
class XFormerTextContrastOutput(ModelOutput):
    """vectors [B, D]: of the texts, of length 1; logits [B, M]: their scores with the second views of all texts of the
    batch; targets [B]: which of these is of the same text, -100 where none is told apart."""

    loss: torch.Tensor | None = None
    vectors: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    hidden_states: tuple[torch.FloatTensor] | None = None
    attentions: tuple[torch.FloatTensor] | None = None
    aux_losses: dict[str, torch.Tensor] | None = None
    segment_memory: SegmentMemory | None = None


@dataclass
class XFormerPhraseContrastOutput(XFormerMaskedLMOutput):
    """phrase_logits [B, M]: scores of each text with the phrases of the batch; phrase_targets [B]: which of these was
    masked in it, -100 where none is told apart."""

    phrase_logits: torch.Tensor | None = None
    phrase_targets: torch.Tensor | None = None


@dataclass
class XFormerContrastivePredictionOutput(XFormerMaskedLMOutput):
    """sentence_logits [B, M, N]: scores of each masked sentence with all that are masked in the batch;
    sentence_targets [B, M]: which of these it is, -100 where none is told apart."""

    sentence_logits: torch.Tensor | None = None
    sentence_targets: torch.Tensor | None = None


@dataclass
class XFormerReorderingOutput(XFormerMaskedLMOutput):
    """reordering_logits [B, orders]: in which order the parts of the document stand."""

    reordering_logits: torch.Tensor | None = None


@dataclass
class XFormerSeq2SeqSequenceClassifierOutput(base.Seq2SeqSequenceClassifierOutput):
    aux_losses: dict[str, torch.Tensor] | None = None


@dataclass
class XFormerSeq2SeqQuestionAnsweringOutput(base.Seq2SeqQuestionAnsweringModelOutput):
    aux_losses: dict[str, torch.Tensor] | None = None


@dataclass
class XFormerImageClassifierOutput(base.ImageClassifierOutput):
    aux_losses: dict[str, torch.Tensor] | None = None


@dataclass
class XFormerMaskedImageOutput(base.MaskedImageModelingOutput):
    aux_losses: dict[str, torch.Tensor] | None = None


@dataclass
class XFormerCTCOutput(base.CausalLMOutput):
    """logits [B, T, V] of states, frame_mask [B, T] boolean: which of them are of real frames (None: all)."""

    aux_losses: dict[str, torch.Tensor] | None = None
    frame_mask: torch.Tensor | None = None


@dataclass
class XFormerForecastOutput(ModelOutput):
    """
    Args:
        prediction_outputs: [B, P, channels], the forecast, in the units of the values.
        params: the head's numbers for each value, of scaled values.
        loc, scale: [B or 1, 1, channels or 1], value = scaled value * scale + loc.
    """

    loss: torch.Tensor | None = None
    prediction_outputs: torch.Tensor | None = None
    params: tuple[torch.Tensor, ...] | None = None
    loc: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None
    aux_losses: dict[str, torch.Tensor] | None = None
