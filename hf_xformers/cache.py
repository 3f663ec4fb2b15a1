"""Generation caches: one layer per execution step, of the kind that its mechanism declares."""

from __future__ import annotations

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache


def self_attention_layers(config) -> list:
    """Cache layers of one tower, by execution step. A mechanism whose state is not plain keys and values says which
    layer keeps it (`AttentionSpec.cache_layer`)."""
    layers = []
    for step in range(config.stack.num_steps(config)):
        layer_config = config.layer(step % max(config.stack.num_layers(config), 1))
        make = getattr(layer_config.attention, "cache_layer", None)
        layers.append(DynamicLayer() if make is None else make(layer_config))
    return layers


class XFormerCache(DynamicCache):
    """A growing cache whose layers are of the kinds that the model's mechanisms declare."""

    def __init__(self, layers: list):
        Cache.__init__(self, layers=layers)


def make_cache(config) -> Cache:
    """An empty cache for a config: of its decoder tower where it has two towers, with room for the memory."""
    if config.is_encoder_decoder:
        return EncoderDecoderCache(XFormerCache(self_attention_layers(config.tower("decoder"))), DynamicCache())
    return XFormerCache(self_attention_layers(config))
