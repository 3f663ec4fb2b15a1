"""Caches: one layer per execution step, of the kind that the mechanism of that layer declares."""

from dataclasses import dataclass

import pytest
import torch
from huggingface_hub.dataclasses import strict
from transformers.cache_utils import DynamicSlidingWindowLayer, EncoderDecoderCache

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForSeq2SeqLM
from hf_xformers.attention.dense import DenseSpec
from hf_xformers.core.cache import RecurrentStateLayer, make_cache
from tests.common.cases import CASES, components, covering
from tests.helpers import close, make_strong, tokens

# Each component once
DECODERS = covering(
    [case for case in CASES if case.shape == "decoder"], lambda case: {part[:2] for part in components(case)}
)

SMALL = dict(vocab_size=40, hidden_size=16, num_attention_heads=4, num_hidden_layers=3, intermediate_size=16)


class Window(DynamicSlidingWindowLayer):
    """Remembers the width it was made for."""

    def __init__(self, width):
        super().__init__(sliding_window=width)
        self.width = width


@strict
@dataclass(kw_only=True)
class Windowed(DenseSpec):
    """Dense attention that declares another cache layer."""

    width: int = 4

    def cache_layer(self, config, layer_idx):
        return Window(config.attention.width)


def test_declared_layers():
    """Each layer's own spec is asked, with that layer's config."""
    layers = {0: {"attention": Windowed(width=5)}, 2: {"attention": Windowed(width=7)}}
    cache = make_cache(XFormerConfig(**SMALL, is_decoder=True, per_layer_config=layers))
    assert [getattr(layer, "width", None) for layer in cache.layers] == [5, None, 7]


def test_two_towers():
    """The decoder's layers count, and there is room for the memory."""
    config = XFormerConfig(
        **SMALL,
        is_encoder_decoder=True,
        num_decoder_layers=2,
        decoder={"per_layer_config": {1: {"attention": Windowed(width=6)}}},
    )
    cache = make_cache(config)
    assert isinstance(cache, EncoderDecoderCache)
    assert [getattr(layer, "width", None) for layer in cache.self_attention_cache.layers] == [None, 6]
    assert len(cache.cross_attention_cache.layers) == 0


def test_no_cache_unless_wanted():
    torch.manual_seed(0)
    ids = tokens(2, 5, high=40)
    model = XFormerForCausalLM(XFormerConfig(**SMALL)).eval()
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids).past_key_values.get_seq_length() == 5
    model = XFormerForCausalLM(XFormerConfig(**SMALL, use_cache=False)).eval()
    assert model(ids).past_key_values is None
    encoder_decoder = XFormerForSeq2SeqLM(XFormerConfig(**SMALL)).eval()
    assert encoder_decoder(ids, labels=ids).past_key_values is None, "training needs none"
    assert encoder_decoder(ids, decoder_input_ids=ids).past_key_values.get_seq_length() == 5


def test_reordering_and_cropping():
    """Rows can be exchanged (beams) and tokens taken back (assisted generation)."""
    torch.manual_seed(0)
    model = make_strong(XFormerForCausalLM(XFormerConfig(**SMALL)).double().eval())
    ids = tokens(2, 6, high=40)
    with torch.no_grad():
        expected = model(ids).logits
        cache = model(ids[:, :5], use_cache=True).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        close(model(ids.flip(0)[:, 5:], past_key_values=cache).logits, expected.flip(0)[:, 5:])
        cache = model(ids, use_cache=True).past_key_values
        cache.crop(-2)  # two tokens fewer
        close(model(ids[:, 4:], past_key_values=cache).logits, expected[:, 4:])


def test_rows_of_a_state():
    """Rows are repeated one after the other, as beams stand, exchanged, and left out."""
    layer, rows = RecurrentStateLayer(), torch.arange(6.0).view(3, 2)
    layer.advance(4, sums=rows, counts=rows[:, 0])
    layer.batch_repeat_interleave(2)
    assert layer.state["sums"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    assert layer.state["counts"].tolist() == [0, 0, 2, 2, 4, 4]
    layer.reorder_cache(torch.tensor([5, 2, 0]))
    assert layer.state["sums"].tolist() == [[4, 5], [2, 3], [0, 1]]
    layer.batch_select_indices(torch.tensor([2, 1]))
    assert layer.state["counts"].tolist() == [0, 2] and layer.get_seq_length() == 4


@pytest.mark.parametrize("attention", ["linear_transformer", "delta_net"])
def test_several_prefixes_continue_twice_each(attention):
    """A batch of two texts, each repeated for two continuations."""
    torch.manual_seed(0)
    model = make_strong(
        XFormerForCausalLM(XFormerConfig(**SMALL, attention=attention, is_decoder=True)).double().eval()
    )
    prefixes, endings = tokens(2, 5, high=40), tokens(4, 3, seed=1, high=40)
    with torch.no_grad():
        cache = model(prefixes, use_cache=True).past_key_values
        cache.batch_repeat_interleave(2)
        found = model(endings, past_key_values=cache).logits
        whole = torch.cat([prefixes.repeat_interleave(2, 0), endings], 1)
        close(found, model(whole, use_cache=False).logits[:, 5:])


def tensors(value):
    """All that hang on an object of a cache."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


@pytest.mark.parametrize("case", DECODERS, ids=str)
def test_a_long_prompt_leaves_its_memory(case):
    """What is kept of it is no part of a tensor of all of it."""
    model = case.build(dtype=torch.float32, strong=False, max_position_embeddings=256)
    with torch.no_grad():
        cache = model(tokens(1, 200), use_cache=True).past_key_values
    storages = {}
    for tensor in tensors(cache):
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), [storage.nbytes(), 0])[1] += tensor.nbytes
    held, needed = map(sum, zip(*storages.values()))
    assert held <= 2 * needed
