"""Contract: `torch.compile` takes the whole model as one graph."""

import collections
import contextlib
import functools
import json

import pytest
import torch

from hf_xformers.blocks.base import XFormerLayer
from hf_xformers.inference import compile_layers
from tests.attention.references import COMPILED, REFERENCES, TRACED
from tests.common.cases import ATTENTION, CASES, components, covering
from tests.helpers import close, close_gradients, gradients, pad, tokens


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Tracing is slow, so what is traced as an encoder and as a decoder is not traced as both at once, and a family whose
# components are all traced elsewhere is not traced again.
ONE_TOWER = {case.name for case in CASES if case.shape != "seq2seq"}


@functools.cache
def traced_alone():
    """Mechanisms of which tests/attention traces layers."""
    specs = [REFERENCES[name].spec for name in (*COMPILED, *TRACED)]
    return {spec if isinstance(spec, str) else spec["type"] for spec in specs}


def traced_parts(case):
    """Each component, and how layers share."""
    plain = {part[:2] for part in components(case) if part[0] not in ATTENTION or part[1] not in traced_alone()}
    return plain | {
        ("field", name) for name in json.loads(case.fields) if name in ("distinct_layers", "num_decoder_layers")
    }


# What most models take in place of their own.
EVERYWHERE = ("feedforward", "normalization", "residual", "position", "embedding")


def companies():
    """Few of the cases, with changes: components that need no company are traced in that of others, which give up
    none that no other case has."""
    cases = [case for case in CASES if case.shape != "seq2seq" or case.name not in ONE_TOWER]
    chosen = covering(cases, lambda case: {part for part in traced_parts(case) if part[0] not in EVERYWHERE})
    shown = collections.Counter(part for case in chosen for part in traced_parts(case))
    layers = [case.preset.layer(0) for case in cases if case.shape != "seq2seq"]
    specs = {(slot, getattr(layer, slot).type): getattr(layer, slot) for layer in layers for slot in EVERYWHERE}
    left = {part: spec for part, spec in specs.items() if part not in shown}
    for case in chosen:
        changes = {}
        for slot, name in list(left):
            own = [part for part in traced_parts(case) if part[0] == slot]
            if slot not in changes and all(shown[part] > 1 for part in own):
                with contextlib.suppress(ValueError):
                    case.config(**changes, **{slot: left[slot, name].to_dict()})
                    changes[slot] = left.pop((slot, name)).to_dict()
                    shown.subtract(own)
        yield case, changes
    for case in covering(cases, lambda case: traced_parts(case) & left.keys()):
        yield case, {}


def stands_alone(case):
    """Whether layers only stand one on another: alike, and without streams that one makes and a later one reads."""
    if any(tower.stack.type != "plain" or tower.is_heterogeneous for tower in case.preset.tower_configs()):
        return False
    model, made, layers = case.shared(), [], []

    def compare(layer, given, output):
        _, names, _, *tensors = output
        made.extend(name for name, x in zip(names, tensors) if all(x is not other for other in given))

    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and all(isinstance(child, XFormerLayer) for child in module):
            layers.append([child.state_dict().keys() for child in module])
    hooks = [module.register_forward_hook(compare) for module in model.modules() if isinstance(module, XFormerLayer)]
    with torch.no_grad():
        case.run(model, tokens(1, 3))
    for hook in hooks:
        hook.remove()
    return not made and all(names == tower[0] for tower in layers for names in tower)


def as_traced(case, **changes):
    """With one layer where a second is traced like the first."""
    if stands_alone(case) and case.preset.distinct_layers is None:
        with contextlib.suppress(ValueError):  # fields that have an entry for each layer
            return case.build(num_hidden_layers=1, **changes)
    return case.build(**changes)


@pytest.mark.parametrize(
    "case, changes", list(companies()), ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given)
)
def test_compile(case, changes):
    """One graph with padding, and the same result."""
    model = as_traced(case, **changes)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        close(*(case.run(run, ids, mask, use_cache=False) for run in (compiled, model)))


SOME = [case for case in CASES if str(case) in ("modern-decoder", "xf_t5-seq2seq")]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_compile_training(case):
    """The traced backward pass as well, with padding."""
    model = as_traced(case)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    output, expected = (case.run(run, ids, mask, use_cache=False) for run in (compiled, model))
    close(output, expected)
    close_gradients(gradients(model, output), gradients(model, expected))


@pytest.mark.slow
def test_compile_to_code():
    """The generated code, not the trace alone."""
    case = next(case for case in CASES if str(case) == "xf_bert-encoder")
    model = case.build(dtype=torch.float32, num_hidden_layers=1)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    with torch.no_grad():
        expected = case.run(model, ids, mask)
        close(case.run(compile_layers(model, fullgraph=True, dynamic=False), ids, mask), expected, 1e-4)


@pytest.mark.parametrize("name", ["xf_bert-encoder", "xf_longformer-encoder", "xf_performer-decoder"])
def test_layers_that_are_alike_share_their_code(name):
    """The first layer makes what a call's layers share, and the rest have one graph."""
    case = next(case for case in CASES if str(case) == name)
    model = case.build(num_hidden_layers=5)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = case.run(model, ids, mask, use_cache=False)
        compiled = compile_layers(model, backend=count, fullgraph=True)
        close(case.run(compiled, ids, mask, use_cache=False), expected)
    assert len(graphs) == 2


def test_a_model_without_layers_of_ours():
    with pytest.raises(ValueError, match="Linear has no layers of hf_xformers"):
        compile_layers(torch.nn.Linear(1, 1))
