"""Layers shared over depth: which runs where, copied weights with summed gradients, a cache slot for each depth."""

import pytest
import torch

from hf_xformers.core.sharing import layer_map
from tests.compression.models import batch, tiny
from tests.helpers import close


def test_which_layer_runs_where():
    """Takase and Kiyono 2021, figure 1."""
    assert layer_map(6, 3, "sequence") == [0, 0, 1, 1, 2, 2]
    assert layer_map(6, 3, "cycle") == [0, 1, 2, 0, 1, 2]
    assert layer_map(6, 3, "cycle_rev") == [0, 1, 2, 2, 1, 0]
    assert layer_map(7, 3, "cycle_rev") == [0, 1, 2, 0, 1, 2, 2]
    assert layer_map(5, 2, "sequence") == [0, 0, 0, 1, 1]
    for order in ("sequence", "cycle", "cycle_rev"):
        assert layer_map(4, 1, order) == [0] * 4 and layer_map(4, 4, "sequence") == [0, 1, 2, 3]


STACKS = {
    "plain": {},
    "rotary": {"position": "rotary", "residual": "pre_ln"},
    "windows": {"attention": {"type": "sliding_window", "window_size": 4}},
    "linear": {"attention": "linear_transformer"},
    "reversible": {"stack": "reversible", "residual": "pre_ln"},
    "segments": {
        "stack": "segment_recurrent",
        "attention": {"type": "transformer_xl", "share_biases": False},
        "position": "none",
    },
}


@pytest.mark.parametrize("order", ["sequence", "cycle", "cycle_rev"])
@pytest.mark.parametrize("name", STACKS)
def test_shared_layers_are_copies_whose_gradients_add_up(name, order):
    fields = {"num_hidden_layers": 4, **STACKS[name]}
    shared, apart = tiny(distinct_layers=2, sharing=order, **fields), tiny(**fields)
    places = layer_map(4, 2, order)
    state = {}
    for key in apart.state_dict():
        prefix, dot, rest = key.partition("layers.")
        number, _, tail = rest.partition(".")
        source = f"{prefix}layers.{places[int(number)]}.{tail}" if dot and number.isdecimal() else key
        state[key] = shared.state_dict()[source].clone()
    apart.load_state_dict(state)
    inputs = batch()
    first, second = shared(**inputs), apart(**inputs)
    close(first.logits, second.logits, 1e-10)
    first.loss.backward()
    second.loss.backward()
    own = dict(apart.named_parameters())
    for key, parameter in shared.named_parameters():
        prefix, dot, rest = key.partition("layers.")
        number, _, tail = rest.partition(".")
        if dot and number.isdecimal():
            depths = [depth for depth, layer in enumerate(places) if layer == int(number)]
            found = [own[f"{prefix}layers.{depth}.{tail}"].grad for depth in depths]
            expected = None if all(value is None for value in found) else sum(v for v in found if v is not None)
        else:
            expected = own[key].grad
        assert (expected is None) == (parameter.grad is None)
        if expected is not None:
            close(parameter.grad, expected, 1e-9)


@pytest.mark.parametrize("attention", ["dense", "linear_transformer"])
def test_every_depth_has_a_cache_of_its_own(attention, tmp_path):
    model = tiny(num_hidden_layers=4, distinct_layers=2, sharing="cycle_rev", attention=attention)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.distinct_layers == 2 and len(again.model.trunk.layers) == 2
    ids, cache, steps = batch()["input_ids"], None, []
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        for column in range(ids.shape[1]):
            output = again(ids[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
    assert len(cache.layers) == 4
    close(torch.cat(steps, 1), whole, 1e-9)


def test_parameters_shrink_and_towers_share_apart():
    one, four = (tiny(num_hidden_layers=4, distinct_layers=count) for count in (1, None))
    layer = sum(p.numel() for p in four.model.trunk.layers[0].parameters())
    assert four.num_parameters() - one.num_parameters() == 3 * layer
    both = tiny("ForSeq2SeqLM", num_hidden_layers=3, num_decoder_layers=2, distinct_layers=1)
    assert len(both.model.trunk.layers) == len(both.model.decoder.layers) == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"distinct_layers": 0}, "`distinct_layers` 0 must be at least 1"),
        ({"distinct_layers": 9}, "at most the tower's 3 layers"),
        ({"stack": "universal"}, "stack 'universal' says itself which of its layers run"),
        ({"attention": "realformer"}, "attention 'realformer' as it is set hands tensors from layer to layer"),
        ({"per_layer_config": {0: {"intermediate_size": 8}}}, "single layers cannot differ"),
        ({"block": "sandwich"}, "block 'sandwich' has other sublayers at depth"),
    ],
)
def test_layers_whose_place_counts_are_not_shared(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**{"distinct_layers": 1, **fields})
