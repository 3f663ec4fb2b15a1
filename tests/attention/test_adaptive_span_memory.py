"""Adaptive span under a stack with segment memory: segments against one pass over the whole text."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from hf_xformers.core.cache import make_cache
from tests.attention.score_helpers import GEOMETRY
from tests.helpers import NO_DROPOUT, close, make_strong, tokens
from tests.stacks.test_segment_recurrent import check_rows_of_any_length, in_segments

SPAN = 5
KINDS = {"windows": {}, "engine": {"relative_keys": False, "include_self": True}, "dynamic": {"dynamic": True}}


def build(memory_length=SPAN, head=XFormerForCausalLM, implementation=None, stack="segment_recurrent", **fields):
    attention = {"type": "adaptive_span", "max_span": SPAN, "ramp": 2, "start": 0.5, **fields}
    config = XFormerConfig(
        **{**GEOMETRY, **NO_DROPOUT, "num_hidden_layers": 2, "vocab_size": 99},
        position="none",
        attention=attention,
        stack={"type": stack, "memory_length": memory_length},
    )
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return make_strong(head(config).double().eval(), amount=0.3)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_segments_are_one_pass(kind, implementation):
    """A memory as long as the span holds all that a token reads, however the text is cut."""
    model, ids = build(implementation=implementation, **KINDS[kind]), tokens(2, 14)
    with torch.no_grad():
        expected = model(ids).logits
        for lengths in ((5, 5, 4), (1,) * 14, (2, 11, 1)):
            found, memory = in_segments(model, ids, lengths)
            close(found, expected)
        assert memory.length == SPAN and len(memory.states) == 2
        short = build(2, implementation=implementation, **KINDS[kind])
        short.load_state_dict(model.state_dict())
        assert (in_segments(short, ids, (5, 5, 4))[0] - expected).abs().max() > 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_padding_never_enters(kind):
    check_rows_of_any_length(build(**KINDS[kind]))


def test_cache_after_a_memory():
    """Generation goes on from a memory, which the cache keeps before the text, and its state stays constant."""
    model, ids = build(), tokens(2, 16)
    with torch.no_grad():
        expected = model(ids).logits
        memory = model(ids[:, :6]).segment_memory
        cache, found = make_cache(model.config), []
        for begin, end in [(6, 9), *((at, at + 1) for at in range(9, 16))]:
            given = {} if found else {"segment_memory": memory}
            found.append(model(ids[:, begin:end], past_key_values=cache, use_cache=True, **given).logits)
    close(torch.cat(found, 1), expected[:, 6:])
    assert cache.get_seq_length() == 10 and all(layer.stored == SPAN for layer in cache.layers)


def test_gradients_reach_spans_and_stop_at_the_memory():
    model, ids = build(), tokens(2, 10)
    vectors = model.get_input_embeddings()(ids).detach()
    first = vectors[:, :5].clone().requires_grad_()
    memory = model(inputs_embeds=first).segment_memory
    output = model(inputs_embeds=vectors[:, 5:], segment_memory=memory)
    assert torch.autograd.grad(output.logits.sum(), first, allow_unused=True, retain_graph=True) == (None,)
    spans = [layer.attention.span for layer in model.model.trunk.layers]
    for gradient in torch.autograd.grad(output.logits.sin().sum(), spans):
        assert gradient.abs().max() > 0
