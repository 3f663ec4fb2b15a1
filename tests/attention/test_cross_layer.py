"""Keys and values that layers share: how many a cache holds, documents of a packed row, and prompts that the layers
above read the end of alone."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM
from tests.attention.score_helpers import GEOMETRY, build_layers, make_context, run_layers, state_size, vectors
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

WINDOW = {"type": "sliding_window", "window_size": 4, "sinks": 0}


@pytest.mark.parametrize(
    ("fields", "owners"),
    [
        ({}, [0, 2, 4]),
        ({"sharing_factor": 3}, [0, 3]),
        ({"sharing_factor": None, "first_layer": 2}, [0, 1, 2]),
        ({"sharing_factor": 1}, [0, 1, 2, 3, 4]),
    ],
)
def test_cache_holds_one_copy(fields, owners):
    """After a prompt and steps, keys and values of 2 heads of width 4 of the layers that make them and no tensor more,
    which beams, a roll-back and a reset of the cache go through."""
    torch.manual_seed(0)
    spec = {"type": "cross_layer_attention", **fields}
    config = XFormerConfig(**GEOMETRY | {"num_hidden_layers": 5}, num_key_value_heads=2, attention=spec)
    model = XFormerForCausalLM(config).eval()
    with torch.no_grad():
        for kind in ("k_proj", "v_proj"):
            made = {name.split("layers.")[1][0] for name in model.state_dict() if kind in name and "weight" in name}
            assert made == {str(owner) for owner in owners}
        cache = model(tokens(3, 6) % 50, use_cache=True).past_key_values
        model(tokens(3, 1) % 50, past_key_values=cache)
        assert [layer.is_initialized for layer in cache.layers] == [number in owners for number in range(5)]
        assert state_size(cache) == 2 * len(owners) * 3 * 2 * 7 * 4
        cache.crop(-2)
        cache.reorder_cache(torch.tensor([2, 0]))
        assert state_size(cache) == 2 * len(owners) * 2 * 2 * 5 * 4 and cache.get_seq_length() == 5
        cache.reset()
        assert cache.get_seq_length() == 0


def test_lower_half_of_windows():
    """As in YOCO: windows below, one copy above, whatever the depth."""
    width = GEOMETRY["hidden_size"]
    for depth in (4, 8):
        half = depth // 2
        config = XFormerConfig(
            **GEOMETRY | {"num_hidden_layers": depth},
            attention={"type": "cross_layer_attention", "sharing_factor": None, "first_layer": half},
            per_layer_config={layer: {"attention": WINDOW} for layer in range(half)},
        )
        model = XFormerForCausalLM(config).eval()
        for length in (10, 20):
            with torch.no_grad():
                cache = model(tokens(1, length) % 50, use_cache=True).past_key_values
            held = [layer.keys.numel() + layer.values.numel() for layer in cache.layers if layer.is_initialized]
            assert held == [2 * 3 * width] * half + [2 * length * width]  # of a window, all but the next token


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_packed_documents(implementation):
    layers, states, lengths = build_layers("cross_layer_attention", 3, True), vectors(1, 9), (4, 5)
    segments = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))[None]
    found = run_layers(layers, states, make_context(9, True, segment_ids=segments, implementation=implementation))
    apart = [run_layers(layers, part, make_context(part.shape[1], True)) for part in states.split(lengths, 1)]
    for number, result in enumerate(found):
        close(result.output, torch.cat([each[number].output for each in apart], 1), 1e-12)


def decoder(lower, **fields):
    """Four layers, of which the last two read keys of the third."""
    torch.manual_seed(0)
    spec = {"type": "cross_layer_attention", "sharing_factor": None, "first_layer": 1}
    settings = {"attention": spec, "per_layer_config": {0: {"attention": lower}}, "position": "rotary"}
    settings |= {"num_hidden_layers": 4, "is_decoder": True, "pad_token_id": 0, "max_position_embeddings": 64}
    config = XFormerConfig(**{**GEOMETRY, **settings, **fields})
    return make_strong(XFormerForCausalLM(config).double().eval(), amount=0.3)


def counted(model):
    """How many tokens each layer's feed-forward was given in the last call."""
    found = [0] * 4
    for number, layer in enumerate(model.model.trunk.layers):
        layer.feedforward.register_forward_pre_hook(
            lambda _, given, number=number: found.__setitem__(number, given[0].shape[1])
        )
    return found


BELOW = {
    "windows": (WINDOW, {}),
    "recurrence": ({"type": "gla", "gate_rank": 3}, {"residual": "pre_ln"}),
    "bias": ("dense", {"position": "t5_relative_bias"}),
    "positions in every layer": ("dense", {"position": "per_layer_position"}),
}


@pytest.mark.parametrize("name", BELOW)
@torch.no_grad()
def test_layers_above_read_the_end_of_a_prompt(name):
    """A text of 12 tokens and one of 7, whole or in pieces, with and without a cache: the last logits are those of a
    call in which all layers run on all tokens."""
    lower, fields = BELOW[name]
    model = decoder(lower, **fields)
    ids, mask = pad([tokens(12, high=50), tokens(7, seed=1, high=50)], 12, "left")
    full, seen = model(ids, attention_mask=mask, use_cache=False).logits, counted(model)
    for count in (1, 3):
        for use_cache in (False, True):
            given = {"attention_mask": mask, "logits_to_keep": count, "use_cache": use_cache}
            close(model(ids, **given).logits, full[:, -count:])
            assert seen == [12, 12, count, count]
        close(model(ids[:1], logits_to_keep=count).logits, full[:1, -count:])
        cache = None
        for begin, end in ((0, 6), (6, 7), (7, 10), (10, 12)):
            given = {"attention_mask": mask[:, :end], "past_key_values": cache, "logits_to_keep": count}
            found = model(ids[:, begin:end], **given, use_cache=True)
            cache, length = found.past_key_values, min(count, end - begin)
            assert seen == [end - begin, end - begin, length, length]
            real = mask[:, end - length : end].bool()
            close(found.logits[real], full[:, end - length : end][real])
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("kind", ["dynamic", "static", "beams", "looked up"])
def test_generation_reads_the_end_of_a_prompt(kind):
    """`generate` asks for the last logits alone: the same text as where it is told to ask for all."""
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    settings |= {"static": {"cache_implementation": "static"}, "beams": {"num_beams": 3}}.get(kind, {})
    ids, mask = pad([tokens(12, high=50), tokens(7, seed=1, high=50)], 12, "left")
    if kind == "looked up":
        settings["prompt_lookup_num_tokens"], ids, mask = 2, ids[:1], mask[:1]
    model = decoder("dense" if kind in ("static", "looked up") else WINDOW)
    expected = model.generate(ids, attention_mask=mask, **settings, logits_to_keep=0)
    lengths, seen = [], counted(model)
    model.model.trunk.register_forward_hook(lambda *_: lengths.append(tuple(seen)))
    assert torch.equal(model.generate(ids, attention_mask=mask, **settings), expected)
    assert min(lengths[0][:2]) >= 12 > max(lengths[0][2:])


@torch.no_grad()
def test_who_needs_all_tokens_has_them():
    """Recorded states and weights, padding behind a text, documents of a packed row, training, states of another
    kind from below, inputs of tokens, experts, and layers that keep keys of their own."""
    ids, mask = pad([tokens(12, high=50), tokens(7, seed=1, high=50)], 12, "right")
    documents = torch.cat((torch.arange(5), torch.arange(7)))[None]
    experts = {"feedforward": {"type": "switch_transformer", "num_experts": 2}}
    languages = {"embedding": {"type": "token", "languages": ("de", "en")}}
    apart = {"attention": {"type": "cross_layer_attention", "sharing_factor": 1}}
    for lower, fields, given, training in (
        (WINDOW, {}, {"output_hidden_states": True}, False),
        (WINDOW, {}, {"output_attentions": True}, False),
        (WINDOW, {}, {"attention_mask": mask, "use_cache": True}, False),
        ("dense", {}, {"position_ids": documents}, False),
        (WINDOW, NO_DROPOUT, {}, True),
        ("realformer", {}, {}, False),
        (WINDOW, languages, {"langs": ids % 2}, False),
        (WINDOW, experts, {}, False),
        (WINDOW, apart, {}, False),
    ):
        model = decoder(lower, **fields).train(training)
        seen, whole = counted(model), model(ids, **given).logits
        close(model(ids, **given, logits_to_keep=2).logits, whole[:, -2:])
        assert seen == [12] * 4
