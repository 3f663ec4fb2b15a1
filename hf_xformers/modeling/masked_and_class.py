# SPDX-License-Identifier: Apache-2.0
"""Masked language modeling and a class of the whole text at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..core.inputs import check_token_labels
from ..core.pooling import pool
from .classifier_transform import refuse_transform
from .language_model import LanguageModel


class MaskedTokensAndClass(LanguageModel):
    """Base of encoders with a head for tokens and a classifier on the pooled vector."""

    reads_pooler = True

    def __init__(self, config):
        refuse_transform(config, type(self).__name__)
        config = self.shaped(config, is_decoder=False, is_encoder_decoder=False)
        classes = self.num_classes(config)
        super().__init__(config)
        self.classifier = nn.Linear(self.model.vector_width, classes)
        self.post_init()

    def num_classes(self, config: Any) -> int:
        """How many classes a text may have. Raises ValueError for a config that cannot tell."""
        raise NotImplementedError

    def both_logits(
        self, attention_mask: Tensor | None, labels: Tensor | None, **inputs: Any
    ) -> tuple[Any, Tensor, Tensor]:
        """The bare model's output, the logits of tokens [B, T, V] and those of the class [B, classes]."""
        base = self.model(attention_mask=attention_mask, **inputs)
        logits = self.lm_head(base.last_hidden_state)
        check_token_labels(labels, logits)
        vector = base.pooler_output
        vector = pool(base.last_hidden_state, attention_mask, "first") if vector is None else vector
        return base, logits, self.classifier(vector)
