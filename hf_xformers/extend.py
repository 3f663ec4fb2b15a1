# SPDX-License-Identifier: Apache-2.0
"""What components of your own are made of: stable names for modules outside of this package.

```python
from hf_xformers.extend import Position, PositionSpec, ScoreBias, register


@register("position", "log_distance")
class LogDistanceSpec(PositionSpec): ...
```

A component is a spec (a class under [`register`], whose typed fields are the settings) and the module that its `build`
makes. `docs/guides/extend.md` goes through one; objectives have their own base classes in `hf_xformers.objectives`.
"""

import warnings
from typing import Any

from .attention.shared.base import Attention, literal_softmax_attention
from .attention.shared.linear import state_layer
from .attention.shared.spec import AttentionSpec
from .blocks.base import BlockSpec, SublayerPlan, XFormerLayer
from .configuration_xformer import XFormerConfig
from .core.cache import RecurrentStateLayer, SlotStateLayer, appended
from .core.call import Call, SublayerOutput, add_losses
from .core.components import SLOTS, Spec, SpecLike, aliased, bounded, build_spec, preset, register
from .core.prepared import Prepared, State, one_state
from .core.reading_weights import weight_of
from .core.visibility import boolean_mask, visible_pairs
from .embedding.base import EmbeddingSpec
from .families import VariantInfo, make_family
from .feedforward.base import FeedForward, FeedForwardSpec
from .heads.base import HeadSpec
from .heads.language_model import LanguageModelHead
from .normalization.base import NormSpec
from .position.base import Position, PositionSpec, Rotation, ScoreBias
from .stacks.base import Stack, StackSpec
from .stacks.driver import Pass, StackOutput, memory_by_step


def __getattr__(name: str) -> Any:
    if name != "LayerContext":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("`LayerContext` goes in version 0.3; write `Call`.", FutureWarning, stacklevel=2)
    return Call


__all__ = [
    "SLOTS",
    "Attention",
    "AttentionSpec",
    "BlockSpec",
    "EmbeddingSpec",
    "FeedForward",
    "FeedForwardSpec",
    "HeadSpec",
    "LanguageModelHead",
    "Call",
    "NormSpec",
    "Pass",
    "Position",
    "PositionSpec",
    "Prepared",
    "RecurrentStateLayer",
    "Rotation",
    "ScoreBias",
    "SlotStateLayer",
    "Spec",
    "SpecLike",
    "Stack",
    "StackOutput",
    "StackSpec",
    "State",
    "SublayerOutput",
    "SublayerPlan",
    "VariantInfo",
    "XFormerConfig",
    "XFormerLayer",
    "add_losses",
    "aliased",
    "appended",
    "boolean_mask",
    "bounded",
    "build_spec",
    "literal_softmax_attention",
    "make_family",
    "memory_by_step",
    "one_state",
    "preset",
    "register",
    "state_layer",
    "visible_pairs",
    "weight_of",
]
