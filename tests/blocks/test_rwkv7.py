"""RWKV-7's channel mixing written out, in whole texts, documents and pieces."""

import torch

from hf_xformers import XFormerConfig, XFRwkv7Config, XFRwkv7ForCausalLM
from hf_xformers.blocks.rwkv7 import ChannelMixing
from hf_xformers.core.cache import make_cache
from tests.attention.score_helpers import GEOMETRY, make_context, state_size, vectors
from tests.helpers import close, make_strong, tokens

RANKS = {"type": "rwkv7", "decay_rank": 3, "rate_rank": 5, "value_rank": 2, "gate_rank": 4}


def literal(mixing, x):
    found, last = [], torch.zeros_like(x[0])
    for token in x:
        read = token + (last - token) * mixing.mix
        found.append(mixing.down_proj.weight @ (mixing.up_proj.weight @ read).clamp(min=0) ** 2)
        last = token
    return torch.stack(found)


@torch.no_grad()
def test_channel_mixing():
    """Padding on both sides and inside, packed documents, and pieces with a cache of the last real token."""
    torch.manual_seed(0)
    mixing = ChannelMixing(XFormerConfig(**GEOMETRY, is_decoder=True, attention="rwkv7"), 0).double()
    for parameter in mixing.parameters():
        parameter.copy_(torch.randn(parameter.shape).double())
    x, mask = vectors(3, 9), torch.ones(3, 9, dtype=torch.bool)
    mask[0, :3], mask[1, 6:], mask[2, 4] = False, False, False
    found = mixing(x, make_context(9, True, padding_mask=mask)).output
    for row in range(3):
        close(found[row, mask[row]], literal(mixing, x[row, mask[row]]), 1e-12)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]]).expand(3, -1)
    found = mixing(x, make_context(9, True, segment_ids=documents)).output
    apart = [literal(mixing, part) for part in x[1].split((4, 2, 3))]
    close(found[1], torch.cat(apart), 1e-12)
    cache, done, found = make_cache(XFormerConfig(**GEOMETRY, is_decoder=True, attention="rwkv7")), 0, []
    for size in (4, 1, 4):
        piece = slice(done, done + size)
        context = make_context(size, True, past=done, padding_mask=mask[:, : done + size])
        found.append(mixing(x[:, piece], context, past_key_values=cache, step=0).output)
        done += size
    for row in range(3):
        close(torch.cat(found, 1)[row, mask[row]], literal(mixing, x[row, mask[row]]), 1e-12)


@torch.no_grad()
def test_state_of_a_layer():
    """K V numbers for each head and two tokens, whatever the length."""
    config = XFRwkv7Config(**GEOMETRY, attention=RANKS)
    model = make_strong(XFRwkv7ForCausalLM(config).eval())
    width, heads = config.hidden_size, config.num_attention_heads
    for length in (3, 11):
        cache = model(tokens(2, length) % 50, use_cache=True).past_key_values
        assert state_size(cache) == config.num_hidden_layers * 2 * (width * width // heads + 2 * width)
