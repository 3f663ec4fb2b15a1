# SPDX-License-Identifier: Apache-2.0
"""The classes that every family's heads derive from, by head name. A checkpoint that carries its code has a shorter
table: that of its own heads."""

from __future__ import annotations

from typing import Any

from ..modeling_xformer import XFormerModel
from .bidirectional_lm import XFormerForBidirectionalLM
from .classifiers import (
    XFormerForMultipleChoice,
    XFormerForQuestionAnswering,
    XFormerForSequenceClassification,
    XFormerForTokenClassification,
)
from .cloze_writing import XFormerForClozeWriting
from .contrastive_prediction import XFormerForContrastivePrediction
from .entity_replacement import XFormerForEntityReplacement
from .forecasting import XFormerForTimeSeriesPrediction
from .image import XFormerForImageClassification, XFormerImageModel
from .language import XFormerForCausalLM, XFormerForMaskedLM, XFormerForSeq2SeqLM
from .masked_image import XFormerForMaskedImageModeling
from .masked_sentences import XFormerForMaskedSentences
from .multi_token_prediction import XFormerForMultiTokenPrediction
from .phrase_contrast import XFormerForPhraseContrast
from .reordering import XFormerForSegmentReordering
from .replaced_token_pretraining import XFormerForReplacedTokenPreTraining
from .replaced_tokens import XFormerForReplacedTokenDetection
from .sentence_pairs import XFormerForNextSentencePrediction, XFormerForPreTraining
from .sound import XFormerForCTC, XFormerSoundModel
from .span_boundary import XFormerForSpanBoundary
from .text_contrast import XFormerForTextContrast

CLASSES: dict[str, Any] = {
    "Model": XFormerModel,
    "ForMaskedLM": XFormerForMaskedLM,
    "ForCausalLM": XFormerForCausalLM,
    "ForSeq2SeqLM": XFormerForSeq2SeqLM,
    "ForSequenceClassification": XFormerForSequenceClassification,
    "ForTokenClassification": XFormerForTokenClassification,
    "ForQuestionAnswering": XFormerForQuestionAnswering,
    "ForMultipleChoice": XFormerForMultipleChoice,
    "ForNextSentencePrediction": XFormerForNextSentencePrediction,
    "ForPreTraining": XFormerForPreTraining,
    "ForReplacedTokenDetection": XFormerForReplacedTokenDetection,
    "ForReplacedTokenPreTraining": XFormerForReplacedTokenPreTraining,
    "ForSegmentReordering": XFormerForSegmentReordering,
    "ForSpanBoundary": XFormerForSpanBoundary,
    "ForEntityReplacement": XFormerForEntityReplacement,
    "ForTextContrast": XFormerForTextContrast,
    "ForPhraseContrast": XFormerForPhraseContrast,
    "ForContrastivePrediction": XFormerForContrastivePrediction,
    "ForTimeSeriesPrediction": XFormerForTimeSeriesPrediction,
    "ForMaskedSentences": XFormerForMaskedSentences,
    "ForMultiTokenPrediction": XFormerForMultiTokenPrediction,
    "ForBidirectionalLM": XFormerForBidirectionalLM,
    "ForClozeWriting": XFormerForClozeWriting,
    "ForImageClassification": XFormerForImageClassification,
    "ForMaskedImageModeling": XFormerForMaskedImageModeling,
    "ForCTC": XFormerForCTC,
}
# By what a family reads, in place of the above.
MODALITY_CLASSES: dict[str, dict[str, Any]] = {
    "image": {"Model": XFormerImageModel},
    "sound": {"Model": XFormerSoundModel},
}
