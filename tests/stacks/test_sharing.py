"""Layers shared over depth: which runs where, copied weights with summed gradients, a cache slot for each depth."""

import copy

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


@pytest.mark.parametrize(
    ("name", "order"), [("plain", "sequence"), ("plain", "cycle_rev"), *((name, "cycle") for name in STACKS)]
)
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
    first, second = shared.train()(**inputs), apart.train()(**inputs)  # reversible layers rebuild inputs in training
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


# ------------------------------------------------------------------------------------------------ parts of layers


def lenders(places):
    """The first depth that has the number of each."""
    return [places.index(place) for place in places]


def source_of(key, owners, share):
    """The name in the shared model of a tensor of the model that shares nothing."""
    prefix, dot, rest = key.partition("layers.")
    number, _, tail = rest.partition(".")
    if not (dot and number.isdecimal()):
        return key
    shared = tail.startswith({"attention": ("attention.", "cross_attention."), "feedforward": "feedforward."}[share])
    return f"{prefix}layers.{owners[int(number)] if shared else number}.{tail}"


@pytest.mark.parametrize("share", ["attention", "feedforward"])
@pytest.mark.parametrize("name", [*STACKS, "compressive", "seq2seq"])
def test_shared_parts_are_copies_whose_gradients_add_up(name, share):
    head = "ForSeq2SeqLM" if name == "seq2seq" else "ForCausalLM"
    fields = {"num_hidden_layers": 4, **STACKS.get(name, {})}
    if name == "compressive":
        fields |= {**STACKS["segments"], "stack": {"type": "compressive", "compressed_length": 2}}
    places = [0, 1, 1, 0]
    shared, apart = tiny(head, layer_map=places, share=share, **fields), tiny(head, **fields)
    owners = lenders(places)
    assert len(shared.model.trunk.layers) == 4
    apart.load_state_dict(
        {key: shared.state_dict()[source_of(key, owners, share)].clone() for key in apart.state_dict()}
    )
    inputs = batch()
    first, second = shared.train()(**inputs), apart.train()(**inputs)
    close(first.logits, second.logits, 1e-10)
    first.loss.backward()
    second.loss.backward()
    expected = {}
    for key, parameter in apart.named_parameters():
        if parameter.grad is not None:
            source = source_of(key, owners, share)
            expected[source] = expected.get(source, 0) + parameter.grad
    own = {key: parameter.grad for key, parameter in shared.named_parameters() if parameter.grad is not None}
    assert own.keys() == expected.keys()
    for key, gradient in own.items():
        close(gradient, expected[key], 1e-9)


def test_a_map_is_an_order_written_out():
    for order in ("sequence", "cycle", "cycle_rev"):
        named = tiny(num_hidden_layers=4, distinct_layers=2, sharing=order)
        mapped = tiny(num_hidden_layers=4, layer_map=layer_map(4, 2, order))
        close(mapped(**batch()).logits, named(**batch()).logits, 0.0)
        for share in ("attention", "feedforward"):
            named = tiny(num_hidden_layers=4, distinct_layers=2, sharing=order, share=share)
            mapped = tiny(num_hidden_layers=4, layer_map=layer_map(4, 2, order), share=share)
            close(mapped(**batch()).logits, named(**batch()).logits, 0.0)


@pytest.mark.parametrize("share", ["attention", "feedforward"])
@pytest.mark.parametrize("attention", ["dense", "linear_transformer"])
def test_every_depth_that_borrows_has_a_cache_of_its_own(attention, share, tmp_path):
    model = tiny(num_hidden_layers=4, layer_map=[0, 1, 0, 1], share=share, attention=attention)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.layer_map == [0, 1, 0, 1] and again.config.share == share
    assert again.state_dict().keys() == model.state_dict().keys()
    assert not any(key.split(".")[3:5] == ["2", share] for key in model.state_dict())
    ids, cache, steps = batch()["input_ids"], None, []
    with torch.no_grad():
        whole = model(ids, use_cache=False, output_attentions=attention == "dense")
        for column in range(ids.shape[1]):
            output = again(ids[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
    assert len(cache.layers) == 4
    close(torch.cat(steps, 1), whole.logits, 1e-9)
    if attention == "dense":
        assert len(whole.attentions) == 4


def test_copies_of_a_model_borrow_from_their_own_layers():
    model = tiny(distinct_layers=1, share="attention")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.trunk.layers[0].attention.q_proj.weight.mul_(2)
    layers = twin.model.trunk.layers
    assert layers[2].function(layers[2].plan[0]) is layers[0].attention
    assert not torch.allclose(twin(**batch()).logits, model(**batch()).logits)


def test_an_adapter_on_what_is_shared_acts_at_every_depth():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        tiny(double=False, distinct_layers=1, share="attention"),
        peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 1
    merged = copy.deepcopy(adapted).merge_and_unload()
    inputs = batch()
    with torch.no_grad():
        close(merged(**inputs).logits, adapted(**inputs).logits, 1e-5)


def test_heads_go_from_all_depths_and_layers_do_not():
    from hf_xformers.compression.head_pruning import head_layers, prune_heads
    from hf_xformers.compression.layers import prune_layers

    model = tiny(double=False, distinct_layers=1, share="attention")
    (only,) = head_layers(model)
    smaller = prune_heads(model, {only.key: [[0, 1, 2]]})
    assert smaller.config.num_attention_heads == 3 and not smaller.config.is_heterogeneous
    with pytest.raises(ValueError, match="share their attention"):
        prune_layers(model, {"model.trunk": [0, 1]})


def test_feedforwards_are_shared_where_attention_hands_tensors_on():
    model = tiny(distinct_layers=1, share="feedforward", attention="realformer")
    layers = model.model.trunk.layers
    assert layers[1].function(layers[1].plan[1]) is layers[0].feedforward
    assert layers[1].attention is not layers[0].attention


def test_unlike_parts_are_refused():
    with pytest.raises(ValueError, match="the two are not alike"):
        tiny(distinct_layers=1, share="feedforward", feedforward={"type": "product_key_memory", "layers": [1]})


@pytest.mark.parametrize("share, names", [("all", ["0", "1"]), ("attention", ["0", "2"]), ("feedforward", ["0", "2"])])
def test_a_student_shares_as_its_teacher_does(share, names):
    """Of the layers 0 and 2 of four: what these ran at their depths."""
    from hf_xformers.compression.students import StudentChoice, build_student

    teacher = tiny(double=False, num_hidden_layers=4, layer_map=[0, 0, 1, 1], share=share)
    student = build_student(teacher, StudentChoice(), 0).model
    assert student.config.layer_map == [0, 1]
    first, second = student.state_dict(), teacher.state_dict()
    for mine, other in enumerate(names):
        for part in ("attention.q_proj.weight", "feedforward.up_proj.weight", "attention_residual.norm.weight"):
            close(first[f"model.trunk.layers.{mine}.{part}"], second[f"model.trunk.layers.{other}.{part}"], 0.0)
