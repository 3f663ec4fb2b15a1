# SPDX-License-Identifier: Apache-2.0
"""The heads of families by name, which those that list classes read without importing any."""

from __future__ import annotations

# Auto classes of the heads; heads without one in transformers fall back to AutoModelForPreTraining.
_AUTO = {
    "Model": "AutoModel",
    "ForReplacedTokenDetection": "AutoModelForPreTraining",
    "ForReplacedTokenPreTraining": "AutoModelForPreTraining",
    "ForSegmentReordering": "AutoModelForPreTraining",
    "ForSpanBoundary": "AutoModelForPreTraining",
    "ForEntityReplacement": "AutoModelForPreTraining",
    "ForTextContrast": "AutoModelForPreTraining",
    "ForPhraseContrast": "AutoModelForPreTraining",
    "ForContrastivePrediction": "AutoModelForPreTraining",
    "ForMaskedSentences": "AutoModelForPreTraining",
    "ForMultiTokenPrediction": "AutoModelForPreTraining",
    "ForBidirectionalLM": "AutoModelForPreTraining",
    "ForClozeWriting": "AutoModelForPreTraining",
}
# Head name -> the Auto class that resolves it. What it derives from stands in `head_classes`.
HEADS: dict[str, str] = {
    head: _AUTO.get(head, f"AutoModelF{head[1:]}")
    for head in (
        "Model",
        "ForMaskedLM",
        "ForCausalLM",
        "ForSeq2SeqLM",
        "ForSequenceClassification",
        "ForTokenClassification",
        "ForQuestionAnswering",
        "ForMultipleChoice",
        "ForNextSentencePrediction",
        "ForPreTraining",
        "ForReplacedTokenDetection",
        "ForReplacedTokenPreTraining",
        "ForSegmentReordering",
        "ForSpanBoundary",
        "ForEntityReplacement",
        "ForTextContrast",
        "ForPhraseContrast",
        "ForContrastivePrediction",
        "ForTimeSeriesPrediction",
        "ForMaskedSentences",
        "ForMultiTokenPrediction",
        "ForBidirectionalLM",
        "ForClozeWriting",
        "ForImageClassification",
        "ForMaskedImageModeling",
        "ForCTC",
    )
}
# Heads whose last layer, `classifier`, has an output for each label of a task.
LABEL_HEADS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForReplacedTokenDetection",
)
# Heads that `transformers serve` runs, and the Auto class by which it finds a model that is none of transformers' own.
SERVED = {"ForCausalLM": "AutoModelForDecision"}

ENCODER_HEADS = (
    "Model",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
SENTENCE_PAIR_HEADS = ("ForNextSentencePrediction", "ForPreTraining")
DECODER_HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
SEQ2SEQ_HEADS = ("Model", "ForSeq2SeqLM", "ForSequenceClassification", "ForQuestionAnswering")
IMAGE_HEADS = ("Model", "ForImageClassification")
SOUND_HEADS = ("Model", "ForCTC")
ALL_HEADS = (*ENCODER_HEADS, "ForCausalLM", "ForSeq2SeqLM")
# The free mix: the others need more than an `XFormerConfig` has.
FREE_HEADS = tuple(
    head
    for head in HEADS
    if head
    not in (
        "ForImageClassification",
        "ForCTC",
        "ForMaskedImageModeling",
        "ForSegmentReordering",
        "ForSpanBoundary",
        "ForContrastivePrediction",
        "ForClozeWriting",
    )
)
