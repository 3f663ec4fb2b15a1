# SPDX-License-Identifier: Apache-2.0
"""Pretraining objectives: a spec per objective, its data collator, and the noise in two functions (draw, apply)."""

from __future__ import annotations

from .bart_denoising import BartDenoisingCollator, BartDenoisingObjective
from .base import IGNORE_INDEX, OBJECTIVES, Collator, Objective, build_objective, pad_rows, register
from .bidirectional_lm import BidirectionalLMCollator, BidirectionalLMObjective
from .causal_lm import CausalLMCollator, CausalLMObjective
from .contrastive import ContrastiveCollator, ContrastiveObjective
from .entity_phrase_masking import EntityPhraseCollator, EntityPhraseObjective
from .entity_replacement import EntityReplacementCollator, EntityReplacementObjective
from .info_word import InfoWordCollator, InfoWordObjective
from .insertion import InsertionCollator, InsertionObjective
from .masked_lm import MaskedLMCollator, MaskedLMObjective, word_unit_ids
from .mass import MassCollator, MassObjective
from .multi_token_prediction import MultiTokenObjective
from .permuted_lm import PermutedLMCollator, PermutedLMObjective
from .replaced_tokens import ReplacedTokenCollator, ReplacedTokenObjective
from .sentence_masking import SentenceMaskingCollator, SentenceMaskingObjective
from .sentence_pairs import NextSentenceObjective, SentenceOrderObjective, SentencePairCollator, sentence_pairs
from .span_bert import SpanBertCollator, SpanBertObjective
from .span_corruption import SpanCorruptionCollator, SpanCorruptionObjective
from .t5_corruption import T5CorruptionCollator, T5CorruptionObjective
from .unilm import UniLMCollator, UniLMObjective

__all__ = [
    "IGNORE_INDEX",
    "OBJECTIVES",
    "BartDenoisingCollator",
    "BartDenoisingObjective",
    "BidirectionalLMCollator",
    "BidirectionalLMObjective",
    "CausalLMCollator",
    "CausalLMObjective",
    "Collator",
    "ContrastiveCollator",
    "ContrastiveObjective",
    "EntityPhraseCollator",
    "EntityPhraseObjective",
    "EntityReplacementCollator",
    "EntityReplacementObjective",
    "InfoWordCollator",
    "InfoWordObjective",
    "InsertionCollator",
    "InsertionObjective",
    "MaskedLMCollator",
    "MaskedLMObjective",
    "MassCollator",
    "MassObjective",
    "MultiTokenObjective",
    "NextSentenceObjective",
    "Objective",
    "PermutedLMCollator",
    "PermutedLMObjective",
    "ReplacedTokenCollator",
    "ReplacedTokenObjective",
    "SentenceMaskingCollator",
    "SentenceMaskingObjective",
    "SentenceOrderObjective",
    "SentencePairCollator",
    "SpanBertCollator",
    "SpanBertObjective",
    "SpanCorruptionCollator",
    "SpanCorruptionObjective",
    "T5CorruptionCollator",
    "T5CorruptionObjective",
    "UniLMCollator",
    "UniLMObjective",
    "build_objective",
    "pad_rows",
    "register",
    "sentence_pairs",
    "word_unit_ids",
]
