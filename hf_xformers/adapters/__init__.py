# SPDX-License-Identifier: Apache-2.0
"""Adapters that `peft` does not have, several per model, by name: bottlenecks (Houlsby et al. 2019, Pfeiffer et al.
2021), fusions of them, and networks next to the layers (K-Adapter, Wang et al. 2021).

add_adapter(model, "reviews", "houlsby")      # frozen base; trains the adapter, the norms and the head
... train ...
save_adapter(model, "runs/reviews", "reviews")
activate(model, None)                         # the base as it was
load_adapter(model, "runs/other")             # another task on the same base
add_fusion(model, "all", ["reviews", "runs/more"])  # what they know together (Pfeiffer adapters)
merge_adapter(model)  # of LoRA alone: a plain model that computes the same
"""

from .bottleneck import KINDS, AdapterConfig, Bottleneck
from .fusion import Fusion, FusionConfig
from .k_adapter import KAdapter, KAdapterConfig
from .merging import merge_adapter
from .named import (
    activate,
    active_adapter,
    adapter_names,
    add_adapter,
    add_fusion,
    load_adapter,
    remove_adapter,
    save_adapter,
)

__all__ = [
    "KINDS",
    "AdapterConfig",
    "Bottleneck",
    "Fusion",
    "FusionConfig",
    "KAdapter",
    "KAdapterConfig",
    "activate",
    "active_adapter",
    "adapter_names",
    "add_adapter",
    "add_fusion",
    "load_adapter",
    "merge_adapter",
    "remove_adapter",
    "save_adapter",
]
