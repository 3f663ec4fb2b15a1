"""A sliding window with the first tokens in sight: against its equation, in a cache of constant size, and padded."""

import pytest
import torch

from hf_xformers import XFormerConfig, XFormerForCausalLM, XFormerModel
from hf_xformers.attention.sliding_window import SinkWindowLayer
from tests.helpers import close, make_strong, tokens

LENGTH = 14


def config(causal=True, **attention):
    spec = {"type": "sliding_window", "window_size": 3, "sinks": 2, **attention}
    return XFormerConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position="rotary",
        normalization="rms_norm",
        is_decoder=causal,
        attention=spec,
    )


def padded(side):
    ids, order = tokens(3, LENGTH, high=50), torch.arange(LENGTH)
    lengths = torch.tensor([[LENGTH], [9], [1]])
    mask = order < lengths if side == "right" else order >= LENGTH - lengths
    return {"input_ids": ids, "attention_mask": mask.long()}


def pairs(mask, causal, size, sinks):
    """Who reads whom, one pair at a time."""
    found = torch.zeros(len(mask), LENGTH, LENGTH, dtype=torch.bool)
    for row, real in enumerate(mask.bool().tolist()):
        first = [slot for slot in range(LENGTH) if real[slot]][:sinks]
        for i in range(LENGTH):
            for j in range(LENGTH):
                near = i - size < j <= i if causal else abs(i - j) <= size
                early = j in first and (j <= i or not causal)
                found[row, i, j] = real[j] and (near or early)
    return found


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fields", [{}, {"sinks": 0}, {"window_size": 1, "sinks": 5}, {"score_cap": 0.6}], ids=str)
def test_equation(fields, causal, side):
    """The same as dense attention with the mask of pairs; the tiles give what the literal path does."""
    made, given = config(causal, **fields), padded(side)
    model = make_strong(XFormerModel(made)).eval()
    dense = config(causal)
    dense.attention = {"type": "dense", "score_cap": fields.get("score_cap")}
    other = XFormerModel(dense).eval()
    other.load_state_dict(model.state_dict())
    spec, real = made.attention, given["attention_mask"].bool()
    allowed = pairs(given["attention_mask"], causal, spec.window_size, spec.sinks)[:, None]
    places = (real.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(**given).last_hidden_state
        weights = model(**given, output_attentions=True)
        expected = other(given["input_ids"], attention_mask=allowed, position_ids=places, output_attentions=True)
    close(found[real], expected.last_hidden_state[real], 2e-5)
    close(weights.last_hidden_state[real], expected.last_hidden_state[real], 2e-5)
    close(weights.attentions[0].transpose(1, 2)[real], expected.attentions[0].transpose(1, 2)[real], 1e-5)


@pytest.mark.parametrize("fields", [{}, {"query_key_norm": "head", "window_size": 1}, {"sinks": 7}], ids=str)
@pytest.mark.parametrize("start", [1, 8])
def test_cache_of_constant_size(start, fields):
    """Token by token as the whole text at once, with padding in front; the state holds a window and the sinks."""
    model = make_strong(XFormerForCausalLM(config(**fields))).eval()
    ids = tokens(2, 20, high=50)
    mask = torch.ones_like(ids)
    mask[1, : start - 1] = 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        output = model(ids[:, :start], attention_mask=mask[:, :start], use_cache=True)
        past, found = output.past_key_values, [output.logits[:, -1:]]
        for end in range(start + 1, 21):
            step = model(ids[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=past)
            found.append(step.logits)
    close(torch.cat(found, dim=1), whole[:, start - 1 :], 2e-5)
    spec = model.config.attention
    for layer in past.layers:
        assert isinstance(layer, SinkWindowLayer) and layer.get_seq_length() == 20
        assert layer.keys.shape[2] == max(spec.window_size, 2) - 1 and layer.sinks[0].shape[2] == spec.sinks


def test_beams_keep_their_sinks():
    """Beam search through the cache finds what it finds without one."""
    model = make_strong(XFormerForCausalLM(config())).eval()
    given = {"input_ids": tokens(2, 6, high=50), "attention_mask": torch.tensor([[1] * 6, [0, 0] + [1] * 4])}
    options = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    with_cache = model.generate(**given, **options)
    assert torch.equal(with_cache, model.generate(**given, **options, use_cache=False))


def test_gradients():
    """Those of the tiles are those of the literal path."""
    model = make_strong(XFormerModel(config())).eval()
    given, found = padded("left"), []
    for wanted in (False, True):
        model.zero_grad()
        model(**given, output_attentions=wanted).last_hidden_state[given["attention_mask"].bool()].sum().backward()
        found.append({name: tensor.grad.clone() for name, tensor in model.named_parameters()})
    for name, tensor in found[0].items():
        close(tensor, found[1][name], 1e-4)


def test_refusals():
    scaling = {"type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match="`sinks` as they were turned"):
        XFormerConfig(attention="sliding_window", position={"type": "rotary", "scaling": scaling})
    XFormerConfig(attention={"type": "sliding_window", "sinks": 0}, position={"type": "rotary", "scaling": scaling})
    with pytest.raises(ValueError, match="`sinks` >= 0"):
        config(sinks=-1)
