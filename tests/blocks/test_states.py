"""What blocks keep beside attention's keys and values: decoding in pieces, sizes, and rows that are repeated, changed
and left out."""

import pytest
import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerForSeq2SeqLM
from hf_xformers.core.cache import RecurrentStateLayer
from tests.helpers import NO_DROPOUT, close, make_strong, pad, tokens

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
CONVOLUTIONS = {"operations": (("conv_3", "dynamic_conv_7"), ("glu", "conv_11"), ("zero", "identity"))}
DARTS = {"hidden_size": 48, "residual": {"type": "post_ln", "final_norm": True}, "feedforward": "relu"}
EVOLVED = {"block": {"type": "evolved_transformer", "wide_heads": 4}, "feedforward": "evolved_transformer"}
EVOLVED_WINDOWS = {"branches": (10, 16), "branches_inner": (6, 32)}
R_TRANSFORMER = {"block": {"type": "r_transformer", "window": 3, "rnn_per_layer": 2}}
MIXER = {"type": "mamba2", "key_heads": 1, "key_width": 4, "value_width": 6}
# Fields; the state's windows in the first layer, as [slots, width]; its further keys and values, as (heads,
# width), or the state of a recurrence.
KEPT = {
    "convolution": ({"block": {"type": "convolution", "kernel": 5}}, {"convolution": (4, 16)}, {}),
    "cpe": ({"block": "cpe"}, {"peg": (2, 16)}, {}),
    "delight": ({"block": "delight", "hidden_size": 32, "intermediate_size": 8}, {}, {}),
    "evolved": (EVOLVED, EVOLVED_WINDOWS, {"wide_heads": (4, 4)}),
    "evolved, two towers": ({**EVOLVED, "is_encoder_decoder": True}, EVOLVED_WINDOWS, {"wide_heads": (4, 4)}),
    "lite": ({"block": "lite_transformer"}, {"convolution": (2, 8)}, {}),
    "r_transformer": (R_TRANSFORMER, {"local_rnn_0": (2, 16), "local_rnn_1": (2, 16)}, {}),
    "separable": (
        {"block": "separable_convolution", "stack": {"type": "universal", "act": "accumulated"}},
        {"transition": (2, 16), "transition_inner": (4, 16)},
        {},
    ),
    "mask_network": ({"block": {"type": "mask_attention_network", "max_distance": 4}}, {}, {"dynamic_mask": (2, 8)}),
    "hybrid_heads": ({"block": {"type": "hybrid_heads", "mixer": MIXER}}, {}, {"mixer": (2, 4, 6)}),
    "darts": ({"block": "dartsformer", **DARTS}, {}, {"split_0": (2, 12)}),
    "darts of convolutions": (
        {"block": {"type": "dartsformer", **CONVOLUTIONS}, **DARTS},
        {"split_0_conv_3": (2, 24), "split_1_dynamic_conv_7": (6, 24)},
        {},
    ),
    "darts, two towers": (
        {"block": {"type": "dartsformer", **CONVOLUTIONS}, **DARTS, "is_encoder_decoder": True},
        {"split_0_conv_3": (2, 16), "split_1_dynamic_conv_7": (6, 16)},
        {},
    ),
    "darts in search": ({"block": {"type": "dartsformer", "search": True}, **DARTS}, None, None),
    "sandwich": ({"block": {"type": "sandwich", "coefficient": 1}}, {}, {}),
    "parallel": ({"block": {"type": "parallel", "shared_norm": True}}, {}, {}),
}


def build(fields):
    cross = fields.get("is_encoder_decoder", False)
    fields = {**SIZES, "position": "none", "residual": "pre_ln", "is_decoder": not cross, **NO_DROPOUT, **fields}
    torch.manual_seed(0)
    head = XFormerForSeq2SeqLM if cross else XFormerForCausalLM
    return make_strong(head(XFormerConfig(**fields)).double().eval(), amount=0.05), "decoder_" if cross else ""


def kept(part):
    """Keys of a further attention, or the state of a recurrence."""
    return part.state["memory"] if isinstance(part, RecurrentStateLayer) else part.keys


@pytest.mark.parametrize("name", KEPT)
@torch.no_grad()
def test_states(name):
    fields, windows, parts = KEPT[name]
    model, side = build(fields)
    ids, mask = pad([tokens(20, high=50), tokens(3, seed=1, high=50)], 20, "left")
    source = {}
    if side:
        given, known = pad([tokens(4, seed=2, high=50), tokens(2, seed=3, high=50)], 4, "right")
        source = {"encoder_outputs": model.get_encoder()(given, attention_mask=known), "attention_mask": known}

    def run(begin, end, **more):
        more = {f"{side}input_ids": ids[:, begin:end], f"{side}attention_mask": mask[:, :end], **source, **more}
        return model(**more)

    full = run(0, 20, use_cache=False).logits
    cache, found = None, []
    for begin, end in ((0, 1), (1, 8), (8, 9), (9, 20)):
        output = run(begin, end, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        found.append(output.logits)
    close(torch.cat(found, 1)[mask.bool()], full[mask.bool()])
    layers = cache.self_attention_cache.layers if side else cache.layers
    assert len(layers) == 2 and all(layer.get_seq_length() == 20 for layer in layers)
    if windows is not None:
        held = {key: tuple(x.shape) for key, x in getattr(layers[0], "windows", {}).items()}
        assert held == {key: (2, *shape) for key, shape in windows.items()}
        held = {key: tuple(kept(part).shape) for key, part in getattr(layers[0], "parts", {}).items()}
        shapes = {
            key: (heads, 20, *width) if len(width) == 1 else (heads, *width) for key, (heads, *width) in parts.items()
        }
        assert held == {key: (2, *shape) for key, shape in shapes.items()}
    if name.startswith("evolved,"):  # both attentions of both layers keep their own keys of the memory
        keys = [layer.keys for layer in cache.cross_attention_cache.layers]
        assert len({float(x.sum()) for x in keys}) == 4
    if not layers[0].is_croppable:
        with pytest.raises(ValueError, match="rolled back|cannot forget its last tokens"):
            layers[0].crop(-1)
    elif not side:  # tokens are taken back from the further keys and values as well
        cache.crop(-2)
        again = run(18, 20, past_key_values=cache).logits
        close(again[mask[:, 18:].bool()], full[:, 18:][mask[:, 18:].bool()])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 1, 0, 3]))  # texts 1, 0, 0, 1
    cache.batch_select_indices(torch.tensor([0, 2]))
    if not side:
        last = tokens(2, 1, seed=6, high=50)
        longer = torch.cat((mask.flip(0), torch.ones(2, 1).long()), 1)
        step = model(last, attention_mask=longer, past_key_values=cache).logits
        close(step, model(torch.cat((ids.flip(0), last), 1), attention_mask=longer, use_cache=False).logits[:, -1:])


@pytest.mark.parametrize("name", [name for name in KEPT if KEPT[name][1] or KEPT[name][2]])
def test_other_caches_are_refused(name):
    model, side = build(KEPT[name][0])
    given = {f"{side}input_ids": tokens(1, 3, high=50), "input_ids": tokens(1, 3, high=50)}
    with pytest.raises(ValueError, match="make_cache"):
        model(**given, past_key_values=Cache(layer_class_to_replicate=DynamicLayer), use_cache=True)
