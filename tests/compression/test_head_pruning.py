"""Heads: gates of 0 against a loop over heads and against removal, importance against finite differences, geometry by
layer through saving, generation and a second removal."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_xformers.compression.head_pruning import alike_by_tower, gated, head_layers, prune_heads, whole
from hf_xformers.compression.importance import head_importance, least_important
from hf_xformers.compression.layers import prune_layers
from hf_xformers.compression.methods import build_method
from hf_xformers.compression.report import Measuring, seconds_by_turns
from hf_xformers.compression.teaching import probe
from hf_xformers.conversion import to_transformers
from hf_xformers.conversion.swap import open_model as open_converted
from hf_xformers.export import whole_text
from hf_xformers.export.state import sample
from hf_xformers.variants import config_class, family
from tests.compression.models import batch, tiny
from tests.helpers import close, tiny_fields

KEPT = {("model.trunk", 0): [[0, 2, 3]], ("model.trunk", 2): [[1]]}


def gates_for(layers, kept):
    found = {}
    for layer in layers:
        for name, heads in zip(layer.names, {**whole(layers), **kept}[layer.key]):
            found[name] = torch.zeros(layer.heads, dtype=torch.float64)
            found[name][heads] = 1
    return found


def test_a_gate_of_zero_is_a_head_without_its_columns():
    """Against the output projection with the head's columns at zero."""
    model, inputs = tiny(), batch()
    layers = head_layers(model)
    with torch.no_grad():
        plain = model(**inputs).logits
        with gated(layers, {layer.names[0]: torch.ones(4) for layer in layers}):
            close(model(**inputs).logits, plain, 1e-12)
        with gated(layers, gates_for(layers, KEPT)):
            found = model(**inputs).logits
        for layer in layers:
            weight = layer.modules[0].o_proj.weight
            for head in set(range(4)) - set(KEPT.get(layer.key, [range(4)])[0]):
                weight[:, 4 * head : 4 * head + 4] = 0
        close(found, model(**inputs).logits, 1e-12)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"position": "rotary", "residual": "pre_ln"},
        {"position": "t5_bias_per_layer"},
        {"attention": {"type": "dense", "learned_sinks": True, "output_gate": "head"}},
        {"attention": {"type": "sliding_window", "window_size": 4}, "position": "rotary"},
        {"attention": "linear_transformer"},
        {"attention": "performer"},
        {"attention": "delta_net"},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_removal_is_a_closed_gate(fields, tmp_path):
    model, inputs = tiny(**fields), batch()
    layers = head_layers(model)
    pruned = prune_heads(model, KEPT, check=False)
    with torch.no_grad(), gated(layers, gates_for(layers, KEPT)):
        expected = model(**inputs).logits
    with torch.no_grad():
        close(pruned(**inputs).logits, expected, 1e-9)
    assert [layer.modules[0].q_proj.out_features for layer in head_layers(pruned)] == [12, 16, 4]
    pruned.save_pretrained(tmp_path)
    again = type(pruned).from_pretrained(tmp_path)
    assert again.dtype == torch.float64
    with torch.no_grad():
        close(again(**inputs).logits, expected, 1e-9)


def test_caches_have_the_heads_that_are_left():
    model = tiny(position="rotary", num_key_value_heads=2)
    kept = {("model.trunk", 0): [[2, 3]]}
    pruned = prune_heads(model, kept)
    ids = batch()["input_ids"]
    with torch.no_grad():
        found = pruned(ids, use_cache=True)
        shapes = [layer.keys.shape[1] for layer in found.past_key_values.layers]
        assert shapes == [1, 2, 2]
        whole_pass = pruned(ids).logits
        steps, cache = [], None
        for column in range(ids.shape[1]):
            output = pruned(ids[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
    close(torch.cat(steps, 1), whole_pass, 1e-9)
    text = pruned.generate(ids[:1], max_new_tokens=3, do_sample=False)
    assert torch.equal(text, pruned.generate(ids[:1], max_new_tokens=3, do_sample=False, use_cache=False))


def test_importance_is_a_finite_difference():
    model, inputs = tiny(), batch(rows=1)
    layers = head_layers(model)
    found = head_importance(model, layers, [inputs])
    eps = 1e-5
    for layer in layers:
        for head in range(4):
            losses = []
            for value in (1 + eps, 1 - eps):
                gate = torch.ones(4, dtype=torch.float64)
                gate[head] = value
                with torch.no_grad(), gated(layers, {layer.names[0]: gate}):
                    losses.append(float(model(**inputs).loss))
            slope = abs(losses[0] - losses[1]) / (2 * eps)
            assert float(found[layer.key][0, head]) == pytest.approx(slope, rel=1e-4, abs=1e-9)


def test_the_least_important_go_and_every_layer_keeps_one():
    model = tiny()
    layers = head_layers(model)
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    importance = {layers[0].key: scores, layers[1].key: scores + 1, layers[2].key: scores.flip(-1) + 2}
    alike = alike_by_tower(model, layers)
    assert alike == {"model.trunk": "free"}
    kept = least_important(layers, importance, 0.4, alike, by_layer=False)
    assert [kept[layer.key][0] for layer in layers] == [[3], [2, 3], [0, 1, 2, 3]]
    kept = least_important(layers, importance, 0.5, alike, by_layer=True)
    assert [kept[layer.key][0] for layer in layers] == [[2, 3], [2, 3], [0, 1]]
    with pytest.raises(ValueError, match="9 at most can go"):
        least_important(layers, importance, 0.95, alike, by_layer=False)


@pytest.mark.parametrize(
    "fields, kind",
    [
        ({"position": {"type": "t5_relative_bias", "num_buckets": 8, "max_distance": 12}}, "heads"),
        ({"stack": {"type": "universal", "groups": 3}}, "counts"),
        ({"distinct_layers": 2}, "counts"),
    ],
)
def test_layers_that_share_lose_alike(fields, kind):
    model = tiny(double=False, **fields)
    layers = head_layers(model)
    alike = alike_by_tower(model, layers)
    assert alike == {"model.trunk": kind}
    torch.manual_seed(0)
    importance = {layer.key: torch.rand(1, 4) for layer in layers}
    kept = least_important(layers, importance, 0.5, alike, by_layer=False)
    assert {len(rows[0]) for rows in kept.values()} == {2}
    if kind == "heads":
        assert len({tuple(rows[0]) for rows in kept.values()}) == 1
    pruned = prune_heads(model, kept)  # compared with the gates inside
    assert not pruned.config.is_heterogeneous and pruned.config.num_attention_heads == 2


def test_both_attentions_of_a_decoder_lose_as_many():
    model = tiny("ForSeq2SeqLM", double=False)
    layers = head_layers(model)
    decoder = [layer for layer in layers if layer.tower == "model.decoder"]
    assert [len(layer.modules) for layer in decoder] == [2, 2, 2]
    kept = {decoder[1].key: [[0, 1], [2, 3]], layers[0].key: [[1, 2, 3]]}
    pruned = prune_heads(model, kept)
    assert pruned.config.tower("decoder").layer(1).num_attention_heads == 2
    assert pruned.config.tower("trunk").layer(0).num_attention_heads == 3
    assert pruned.config.tower("decoder").layer(0).num_attention_heads == 4
    with pytest.raises(ValueError, match="as many of each"):
        prune_heads(model, {decoder[1].key: [[0, 1], [2]]})


def test_models_that_read_something_else_are_looked_at():
    """Images that are no squares, several texts in a row, and a decoder whose table is shorter than its encoder's."""
    image = {"image_size": (16, 32), "patch_size": 8}
    picture = config_class("xf_vision_transformer")
    torch.manual_seed(0)
    models = [
        family("xf_vision_transformer")["ForImageClassification"](picture(**tiny_fields(picture, **image))).eval(),
        tiny("ForMultipleChoice", double=False),
        tiny("ForSeq2SeqLM", double=False, decoder_vocab_size=9),
    ]
    for model in models:
        first = head_layers(model)[0]
        pruned = prune_heads(model, {first.key: [[0]]})  # compared with the gates inside
        assert head_layers(pruned)[0].heads == 1
    written = models[-1]
    assert sample(written, 2, 20).ids.max() < 9 and whole_text._sample(written, 2, 20)["decoder_input_ids"].max() < 9
    assert seconds_by_turns([written], Measuring(time_batches=1, time_length=8))[0] > 0


def test_conversion_of_a_pruned_model_works_or_says_why_not():
    """Llama has a head width of its own, but layers that are alike; BERT has heads of hidden_size / heads."""
    config = LlamaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, head_dim=4, max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model, _ = open_converted(LlamaForCausalLM(config).eval())
    layers = head_layers(model)
    pruned = prune_heads(model, {layer.key: [[2, 3]] for layer in layers})
    back = to_transformers(pruned, model_type="llama")
    ids = batch()["input_ids"]
    assert (back.config.num_attention_heads, back.config.num_key_value_heads, back.config.head_dim) == (2, 1, 4)
    with torch.no_grad():
        close(back(ids).logits, pruned(ids).logits, 1e-5)
    with pytest.raises(ValueError, match="all layers of a 'llama' model are alike"):
        to_transformers(prune_heads(model, {layers[0].key: [[2, 3]]}), model_type="llama")


@pytest.mark.parametrize(
    "kept, message",
    [
        ({("model.trunk", 1): [[]]}, "layer 1 would lose all of its 4 heads; leave it one, or remove the whole layer"),
        ({("model.trunk", 1): [[0, 7]]}, "has heads from 0 to 3"),
        ({("trunk", 1): [[0]]}, r"no heads to remove in \('trunk', 1\); layers with heads are \('model.trunk', 0\)"),
        ({("model.trunk", 1): [[0], [1]]}, "layer 1 has 1 attentions"),
    ],
)
def test_what_cannot_go_is_refused(kept, message):
    with pytest.raises(ValueError, match=message):
        prune_heads(tiny(double=False), kept)


def test_heads_that_share_keys_leave_together():
    with pytest.raises(ValueError, match="2 heads each of layer 0 share their keys and leave together"):
        prune_heads(tiny(num_key_value_heads=2), {("model.trunk", 0): [[0, 2, 3]]})
    pruned = prune_heads(tiny(num_key_value_heads=1, double=False), {("model.trunk", 0): [[1, 2]]})
    assert pruned.config.layer(0).key_value_heads == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"attention": "talking_heads"}, "know of each other"),
        ({"position": "alibi"}, "know of each other or of their number"),
        ({"attention": {"type": "dense", "query_key_norm": "projection"}}, "normalizes them together"),
        ({"attention": {"type": "dense", "query_key_norm": "each_head"}}, "has a gain for each of them"),
        ({"attention": {"type": "dense", "aggregation": "routing_aggregation"}}, "joins all of them"),
    ],
)
def test_heads_that_know_of_each_other_are_refused(fields, message):
    model = tiny(double=False, **fields)
    with pytest.raises(ValueError, match=message):
        layers = head_layers(model)
        prune_heads(model, {layer.key: [[0, 1, 3] for _ in layer.modules] for layer in layers})


def _as_exported(model):
    with whole_text.as_exported(model, False):
        assert not any(module.training for module in model.modules())


LOOKS = {
    "heads": lambda model: prune_heads(model, KEPT),
    "layers": lambda model: prune_layers(model, {"model.trunk": [0, 2]}),
    "importance": lambda model: head_importance(model, head_layers(model), [batch()]),
    "distillation": lambda model: probe(build_method("distilbert"), model, tiny()),
    "export": _as_exported,
}


@pytest.mark.parametrize("look", LOOKS)
def test_each_module_stays_in_the_mode_that_it_was_in(look):
    """Such as an embedding that does not train."""
    model = tiny().train()
    model.model.trunk.embedding.eval()
    before = [module.training for module in model.modules()]
    LOOKS[look](model)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("look", ["heads", "layers"])
@pytest.mark.parametrize("whole_model", [True, False])
def test_an_adapter_is_merged_first(look, whole_model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = (peft.get_peft_model if whole_model else lambda m, c: peft.inject_adapter_in_model(c, m))(tiny(), config)
    with pytest.raises(ValueError, match=f"{type(model).__name__} is an adapter on its base; merge the two"):
        LOOKS[look](model)
