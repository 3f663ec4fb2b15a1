"""Dense feed-forward forms against their formulas, one token at a time."""

import math

import pytest
import torch

from hf_xformers import XFormerConfig, build_spec
from hf_xformers.core.components import names
from tests.helpers import close, make_strong

WIDTH, INNER = 6, 10


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gelu(x):
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def tanh_gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swish(x):
    return x * sigmoid(x)


def relu(x):
    return max(x, 0.0)


def squared_relu(x):
    return x * x if x > 0 else 0.0


def sigmoid_gelu(x):
    return x / (1 + math.exp(-1.702 * x))


FORMS = [  # spec, activation, gated
    ({"type": "relu"}, relu, False),
    ({"type": "swish"}, swish, False),
    ({"type": "gelu"}, gelu, False),
    ({"type": "gelu", "approximate": "tanh"}, tanh_gelu, False),
    ({"type": "gelu", "approximate": "sigmoid"}, sigmoid_gelu, False),
    ({"type": "squared_relu"}, squared_relu, False),
    ({"type": "glu"}, sigmoid, True),
    ({"type": "bilinear"}, lambda x: x, True),
    ({"type": "reglu"}, relu, True),
    ({"type": "geglu"}, gelu, True),
    ({"type": "geglu", "approximate": "tanh"}, tanh_gelu, True),
    ({"type": "geglu", "approximate": "sigmoid"}, sigmoid_gelu, True),
    ({"type": "swiglu"}, swish, True),
    ({"type": "squared_reglu"}, squared_relu, True),
]
each_form = pytest.mark.parametrize(
    ("spec", "activation", "gated"), FORMS, ids=["-".join(spec.values()) for spec, _, _ in FORMS]
)


def build(spec, **fields):
    config = XFormerConfig(hidden_size=WIDTH, num_attention_heads=2, intermediate_size=INNER, **fields)
    torch.manual_seed(0)
    module = build_spec("feedforward", spec).build(config, layer_idx=0).double().eval()
    return make_strong(module, amount=0.5)


def vectors(*shape, seed=0):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dot(weight, bias, row):
    result = [sum(w * x for w, x in zip(line, row)) for line in weight.tolist()]
    return result if bias is None else [value + float(b) for value, b in zip(result, bias.tolist())]


@each_form
@pytest.mark.parametrize("bias", [True, False])
def test_formula(spec, activation, gated, bias):
    module = build({**spec, "bias": bias})
    expected_names = {f"{part}_proj" for part in (("up", "gate", "down") if gated else ("up", "down"))}
    assert {name for name, child in module.named_children() if child is not None and "proj" in name} == expected_names
    assert all((getattr(module, name).bias is not None) == bias for name in expected_names)
    states = vectors(2, 3)
    output = module(states, None).output
    for b in range(2):
        for t in range(3):
            row = states[b, t].tolist()
            inner = dot(module.up_proj.weight, module.up_proj.bias, row)
            if gated:
                gate = dot(module.gate_proj.weight, module.gate_proj.bias, row)
                inner = [activation(g) * u for g, u in zip(gate, inner)]
            else:
                inner = [activation(u) for u in inner]
            expected = dot(module.down_proj.weight, module.down_proj.bias, inner)
            close(output[b, t], torch.tensor(expected, dtype=torch.float64))


@each_form
def test_aliases(spec, activation, gated):
    """The survey's names of the forms."""
    assert type(build_spec("feedforward", spec["type"] + "_ffn")) is type(build_spec("feedforward", spec["type"]))


@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
def test_chunks(chunk):
    """`chunk_size_feed_forward` bounds the tokens in flight and changes nothing."""
    states = vectors(2, 6)
    whole, chunked = build("swiglu"), build("swiglu", chunk_size_feed_forward=chunk)
    seen = []
    chunked.up_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    close(chunked(states, None).output, whole(states, None).output)
    assert seen == [chunk] * (6 // chunk)


@pytest.mark.parametrize("spec", [{"type": "gelu"}, {"type": "gelu", "approximate": "tanh"}], ids=str)
def test_gelu_keeps_its_input_and_its_result(spec):
    """Two tensors of the inner width for the backward pass, in either form."""
    layer, kept = build(spec), {}
    inputs = torch.randn(2, 50, layer.up_proj.in_features, dtype=layer.up_proj.weight.dtype)

    def keep(tensor):
        if tensor.shape[-1] == layer.up_proj.out_features and tensor.numel() == 100 * tensor.shape[-1]:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(inputs, None)
    assert len(kept) == 2


def test_activation_dropout():
    module = build("relu", activation_dropout_prob=0.5)
    states = vectors(2, 3)
    assert torch.equal(module(states, None).output, module(states, None).output)
    module.train()
    torch.manual_seed(0)
    draws = module(states.repeat(400, 1, 1), None).output.detach().unflatten(0, (400, 2))
    expected = module.eval()(states, None).output
    assert ((draws.mean(0) - expected).abs() < 5 * draws.std(0) / 400**0.5 + 1e-12).all()
    assert draws.std(0).max() > 0.1


def test_every_dense_form_is_tested():
    from hf_xformers.core.components import SLOTS
    from hf_xformers.feedforward.dense import DenseFeedForwardSpec

    dense = {name for name in names("feedforward") if issubclass(SLOTS["feedforward"].get(name), DenseFeedForwardSpec)}
    dense.remove("evolved_transformer")  # it has norms between its maps: tests/blocks/test_evolved_transformer.py
    assert dense == {spec["type"] for spec, _, _ in FORMS}


def test_chunks_keep_no_inner_activations():
    """What the backward pass keeps of a chunked feed-forward has no inner width, and its gradients are the plain
    ones."""
    kept, gradients = {}, {}
    for chunk in (0, 2):
        module, states = build("swiglu", chunk_size_feed_forward=chunk), vectors(2, 5).requires_grad_()
        widths = kept.setdefault(chunk, [])

        def note(tensor, widths=widths):
            if tensor.ndim == 3:
                widths.append(tensor.shape[-1])
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = module(states, None).output
        output.square().sum().backward()
        gradients[chunk] = [states.grad, *(parameter.grad for parameter in module.parameters())]
    assert INNER in kept[0] and INNER not in kept[2]
    for plain, chunked in zip(gradients[0], gradients[2], strict=True):
        close(chunked, plain)
