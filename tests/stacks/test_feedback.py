"""The Feedback Transformer: against the recursion written out, and its own decoding."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForSeq2SeqLM, XFormerModel
from hf_xformers.core.cache import make_cache
from hf_xformers.stacks.feedback import Window
from tests.helpers import NO_DROPOUT, close, close_gradients, gradients, make_strong, pad, tokens

SIZES = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "is_decoder": True,
    "position": "none",
    "residual": "pre_ln",
    **NO_DROPOUT,
}
KINDS = {
    "shared": {},
    "own_projections": {"stack": {"type": "feedback", "share_kv": False}},
    "grouped_heads": {"num_key_value_heads": 2, "attention": {"type": "feedback", "window": 3, "bias": False}},
    "post_ln": {"residual": "post_ln", "stack": {"type": "feedback", "normalize_memory": False}},
    "long_window": {"attention": {"type": "feedback", "window": 20}},
    "window_of_one": {"attention": {"type": "feedback", "window": 1}},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def model(cls=XFormerModel, amount=0.3, **fields):
    torch.manual_seed(0)
    fields = {"attention": {"type": "feedback", "window": 5}, "stack": "feedback", **fields}
    return make_strong(cls(XFormerConfig(**{**SIZES, **fields})).double().eval(), amount=amount)


def by_hand(tower, vectors):
    """The recursion for one text [T, D]: a loop over tokens, layers, heads and the window's places."""
    config, stack = tower.config, tower.stack
    width, window, groups = config.head_width, config.attention.window, stack.groups
    pre_ln = config.residual.type == "pre_ln"
    mix = torch.softmax(stack.mixture, dim=0)
    keys, values, outputs = [], [], []
    for time, embedding in enumerate(vectors):
        state, states = embedding, [embedding]
        for index, layer in enumerate(tower.layers):
            attention, first, second = layer.attention, layer.attention_residual.norm, layer.feedforward_residual.norm
            query = attention.q_proj(first(state) if pre_ln else state).view(-1, width)
            read = []
            for head in range(config.num_attention_heads):
                shared = head // (config.num_attention_heads // config.key_value_heads)
                scores, candidates = [], []
                for distance in range(1, window + 1):
                    past = time - distance
                    key = value = torch.zeros(width, dtype=torch.float64)
                    if past >= 0:
                        key, value = keys[past][index % groups, shared], values[past][index % groups, shared]
                    key = key + attention.key_positions[window - distance]
                    scores.append((query[head] * key).sum() / math.sqrt(width))
                    candidates.append(value)
                weights = torch.softmax(torch.stack(scores), dim=0)
                read.append(sum(weight * value for weight, value in zip(weights, candidates)))
            state = state + attention.o_proj(torch.cat(read))
            state = state if pre_ln else first(state)
            state = state + layer.feedforward.transform(second(state) if pre_ln else state)
            state = state if pre_ln else second(state)
            states.append(state)
        merged = sum(weight * one for weight, one in zip(mix, states))
        merged = merged if stack.norm is None else stack.norm(merged)
        keys.append(stack.k_proj(merged).view(groups, -1, width))
        values.append(stack.v_proj(merged).view(groups, -1, width))
        outputs.append(state)
    result = torch.stack(outputs)
    return result if tower.final_norm is None else tower.final_norm(result)


@each_kind
def test_recursion_by_hand(kind):
    """Outputs and every parameter's gradient, as trained and with every layer's output recorded."""
    net, ids = model(**KINDS[kind]), tokens(2, 9)
    expected = torch.stack([by_hand(net.trunk, row) for row in net.trunk.embedding.tokens(ids)])
    slopes = gradients(net, expected)
    for recorded in (False, True):
        output = net(ids, output_hidden_states=recorded).last_hidden_state
        close(output, expected)
        close_gradients(gradients(net, output), slopes)


@each_kind
@pytest.mark.parametrize("pieces", [(1,) * 11, (4, 1, 3, 1, 2), (6, 5)], ids=str)
def test_segments_equal_one_run(kind, pieces):
    """With the window carried, and with padding on the left of one text."""
    net = model(XFormerForCausalLM, **KINDS[kind])
    ids, mask = pad([tokens(11), tokens(8, seed=1), tokens(1, seed=2)], 11, "left", seed=4)
    with torch.no_grad():
        expected = net(ids, attention_mask=mask).logits
        alone = net(ids[1:2, 3:]).logits
        close(expected[1:2, 3:], alone)
        cache, done, parts = None, 0, []
        for size in pieces:
            seen = done + size
            output = net(ids[:, done:seen], attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
            cache, done = output.past_key_values, seen
            parts.append(output.logits)
            assert cache.get_seq_length() == done
        close(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 32])
def test_window(size):
    """Always the last W entries, in order, split where the snapshot ends."""
    entries = torch.arange(1.0, 101.0).view(100, 1, 1)
    window, zeros = Window(torch.zeros(size, 1), torch.zeros(size, 1)), torch.zeros(size, 1)
    for count in range(100):
        expected = torch.cat([zeros, entries[:count, 0]])[-size:]
        older_keys, older_values, recent_keys, recent_values = window.parts()
        assert recent_keys.shape[0] < max(window.period, 1)
        assert torch.equal(torch.cat([older_keys, recent_keys]), expected)
        assert torch.equal(torch.cat([older_values, recent_values]), -expected)
        assert torch.equal(window.whole()[0], expected)
        window.append(entries[count], -entries[count])


def test_what_the_backward_pass_keeps_grows_linearly():
    """Twice the text takes about twice the memory, though the window holds all of it."""

    def kept(length):
        net = model(num_hidden_layers=1, attention={"type": "feedback", "window": 128})
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = net(tokens(1, length)).last_hidden_state
        assert output.requires_grad
        return sum(storages.values())

    small, large = kept(32), kept(128)
    assert large < 4.4 * small, f"{large / small:.1f} times the memory for 4 times the text"


@each_kind
def test_weights(kind):
    """Recorded weights are those of the recursion: on earlier tokens only, the rest on empty memories; values come
    out."""
    net = model(XFormerForCausalLM, **KINDS[kind])
    window, ids = net.config.attention.window, tokens(2, 9)
    with torch.no_grad():
        output = net(ids, output_attentions=True, output_hidden_states=True)
        close(output.logits, net(ids).logits)
    assert len(output.attentions) == 3 and len(output.hidden_states) == 4
    distance = torch.arange(9)[:, None] - torch.arange(9)[None, :]
    for weights in output.attentions:
        assert weights.shape == (2, 4, 9, 9)
        assert ((weights > 0) == ((distance >= 1) & (distance <= window))).all()
        total = weights.sum(-1)
        assert (total[..., window:] - 1).abs().max() < 1e-12 if window < 9 else (total < 1).all()
        assert (total[..., : min(window, 9)] < 1).all()
    # What a text's first tokens give to empty memories is the softmax over position scores alone.
    layer = net.model.trunk.layers[0]
    entered = layer.attention_residual.norm if net.config.residual.type == "pre_ln" else torch.nn.Identity()
    with torch.no_grad():
        query = layer.attention.heads(layer.attention.q_proj(entered(output.hidden_states[0])))
        scores = (query[:, :, 0] @ layer.attention.key_positions.mT) / 2
        close(torch.softmax(scores, -1).sum(-1) - output.attentions[0][:, :, 0].sum(-1), torch.ones(2, 4).double())


def test_weights_by_key_after_a_cache():
    """With memories carried, a key of an earlier segment has its own column."""
    net = model(XFormerForCausalLM)
    ids, mask = pad([tokens(9), tokens(6, seed=1)], 9, "left", seed=2)
    with torch.no_grad():
        whole = net(ids, attention_mask=mask, output_attentions=True).attentions
        cache = net(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
        rest = net(ids[:, 4:], attention_mask=mask, past_key_values=cache, output_attentions=True).attentions
    real = mask[:, 4:].bool()
    for one, other in zip(whole, rest, strict=True):
        assert other.shape == (2, 4, 5, 9)
        close(other.transpose(1, 2)[real], one[:, :, 4:].transpose(1, 2)[real])
        assert (other[1, :, :, :3] == 0).all(), "weight on padding"


def test_a_decoder_with_an_encoder():
    """Cross-attention at every step, its keys and values made once; decoding equals the whole text."""
    fields = {"decoder": {"stack": "feedback", "attention": {"type": "feedback", "window": 3}}, "is_decoder": False}
    net = model(XFormerForSeq2SeqLM, attention="dense", stack="plain", **fields)
    source, target = tokens(2, 6), tokens(2, 7, seed=1)
    made = []
    for layer in net.get_decoder().layers:
        layer.cross_attention.k_proj.register_forward_hook(lambda *_: made.append(1))
    expected = net(input_ids=source, decoder_input_ids=target, use_cache=False)
    assert len(made) == 3, "the memory is projected at every step"
    changed = source.clone()
    changed[:, 2] = 5 + (changed[:, 2] - 4) % 90
    other = net(input_ids=changed, decoder_input_ids=target, use_cache=False)
    assert ((expected.logits - other.logits).abs().amax(-1) > 1e-6).all()
    recorded = net(input_ids=source, decoder_input_ids=target, use_cache=False, output_attentions=True)
    close(recorded.logits, expected.logits)
    assert [tuple(weights.shape) for weights in recorded.cross_attentions] == [(2, 4, 7, 6)] * 3
    close(recorded.cross_attentions[0].sum(-1), torch.ones(2, 4, 7).double())
    with torch.no_grad():
        memory, cache, parts = net.get_encoder()(source), None, []
        for piece in target.split([3, 1, 3], dim=1):
            output = net(encoder_outputs=memory, decoder_input_ids=piece, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        close(torch.cat(parts, dim=1), expected.logits)
    settings = {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": 2, "do_sample": False}
    texts = [net.generate(input_ids=source, use_cache=use_cache, **settings) for use_cache in (True, False)]
    assert torch.equal(*texts)


def test_other_caches():
    """A cache of keys and values has no place for the window, an assistant cannot be followed, and a static cache,
    whose point is a constant size, is this one."""
    net, ids = model(XFormerForCausalLM), tokens(1, 4)
    with pytest.raises(ValueError, match="which a Cache has no place for"):
        net(ids, past_key_values=Cache(layer_class_to_replicate=DynamicLayer), use_cache=True)
    with pytest.raises(ValueError, match="cannot check drafted tokens"):
        net.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=3)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = net.generate(ids, **settings)
    assert torch.equal(net.generate(ids, cache_implementation="static", **settings), expected)
    assert torch.equal(net.generate(ids, past_key_values=make_cache(net.config), **settings), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "dense"}, "attention 'dense' does not read"),
        ({"stack": "plain"}, "only stack 'feedback' makes, not 'plain'"),
        ({"is_decoder": False}, "causal only and cannot stand in an encoder"),
        ({"position": "rotary"}, "rotates queries and keys"),
        ({"per_layer_config": {0: {"attention": {"type": "feedback", "window": 2}}}}, "all layers the same memories"),
    ],
)
def test_refusals(fields, message):
    with pytest.raises(ValueError, match=message):
        model(**fields)
