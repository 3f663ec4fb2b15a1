"""What differs between the releases of transformers that the package works with."""

from __future__ import annotations

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What transformers calls a cache in the outputs of models and in what `generate` gives them: `cache` from 5.24 on,
`past_key_values` before. Models of this package take either name, and their outputs have this one."""


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache that a model was given under either of its names.

    Raises:
        ValueError: under both.
    """
    if past_key_values is not None and cache is not None and past_key_values is not cache:
        raise ValueError(
            "`cache` and `past_key_values` are two names of one input, but differ here; give one of them."
        )
    return past_key_values if cache is None else cache
