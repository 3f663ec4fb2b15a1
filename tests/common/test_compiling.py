"""Contract: `torch.compile` takes the whole model as one graph."""

import pytest
import torch

from hf_xformers import XFormerConfig
from tests.common.cases import CASES, components, covering
from tests.helpers import close, close_gradients, gradients, pad, tokens


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Tracing is slow, so what is traced as an encoder and as a decoder is not traced as both at once, and a family whose
# components are all traced elsewhere is not traced again.
ONE_TOWER = {case.name for case in CASES if case.shape != "seq2seq"}
DIRECTED = ("stack",)  # components that do something else in a decoder, and steer the graph


def traced_parts(case):
    """Each component, of what is inside attention each form, and each mix."""
    parts = components(case)
    plain = {(slot, name) for slot, name, _, _ in parts}
    forms = {part for part in parts if part[0] in DIRECTED}
    own = {("mix", case.name)} if case.config_class is XFormerConfig else set()
    return plain | forms | {part[:3] for part in parts if part[0] == "position"} | own


TRACED = covering([case for case in CASES if case.shape != "seq2seq" or case.name not in ONE_TOWER], traced_parts)


@pytest.mark.parametrize("case", TRACED, ids=str)
def test_compile(case):
    """One graph with padding, and the same result."""
    model = case.shared()
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        close(case.run(compiled, ids, mask, use_cache=False), case.run(model, ids, mask))


SOME = [case for case in CASES if str(case) in ("xf_bert-encoder", "modern-decoder", "xf_t5-seq2seq")]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_compile_training(case):
    """The traced backward pass as well, with padding."""
    model = case.shared()
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    output, expected = (case.run(run, ids, mask, use_cache=False) for run in (compiled, model))
    close(output, expected)
    close_gradients(gradients(model, output), gradients(model, expected))


@pytest.mark.parametrize("case", SOME[:1], ids=str)
@pytest.mark.slow
def test_compile_to_code(case):
    """The generated code, not the trace alone."""
    model = case.shared(torch.float32)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    with torch.no_grad():
        output = case.run(torch.compile(model, fullgraph=True, dynamic=False), ids, mask)
        close(output, case.run(model, ids, mask), 1e-4)
