# SPDX-License-Identifier: Apache-2.0
"""The free mix: any component in any slot."""

from __future__ import annotations

from ..configuration_xformer import XFormerConfig
from ..families import HEADS, VariantInfo, make_family

INFO = VariantInfo(
    summary="freely mixed components",
    paper="Lin et al. 2022",
    url="https://arxiv.org/abs/2106.04554",
    equation=r"x \leftarrow \mathrm{residual}(x, \mathrm{sublayer}(x))",
    cost="that of its components",
    cite="lin2022survey",
)

# They need more than an `XFormerConfig` has.
_OTHERS = (
    "ForImageClassification",
    "ForCTC",
    "ForMaskedImageModeling",
    "ForSegmentReordering",
    "ForSpanBoundary",
    "ForContrastivePrediction",
    "ForClozeWriting",
)
_family = make_family(XFormerConfig, "XFormer", tuple(head for head in HEADS if head not in _OTHERS), INFO)
XFormerModel = _family["Model"]
XFormerForMaskedLM = _family["ForMaskedLM"]
XFormerForCausalLM = _family["ForCausalLM"]
XFormerForSeq2SeqLM = _family["ForSeq2SeqLM"]
XFormerForSequenceClassification = _family["ForSequenceClassification"]
XFormerForTokenClassification = _family["ForTokenClassification"]
XFormerForQuestionAnswering = _family["ForQuestionAnswering"]
XFormerForMultipleChoice = _family["ForMultipleChoice"]
XFormerForNextSentencePrediction = _family["ForNextSentencePrediction"]
XFormerForPreTraining = _family["ForPreTraining"]
XFormerForEntityReplacement = _family["ForEntityReplacement"]
XFormerForTextContrast = _family["ForTextContrast"]
XFormerForPhraseContrast = _family["ForPhraseContrast"]
XFormerForReplacedTokenDetection = _family["ForReplacedTokenDetection"]
XFormerForReplacedTokenPreTraining = _family["ForReplacedTokenPreTraining"]
XFormerForTimeSeriesPrediction = _family["ForTimeSeriesPrediction"]
XFormerForMaskedSentences = _family["ForMaskedSentences"]
XFormerForMultiTokenPrediction = _family["ForMultiTokenPrediction"]
XFormerForBidirectionalLM = _family["ForBidirectionalLM"]
