"""Contract: `torch.compile` takes the whole model as one graph."""

import pytest
import torch

from tests.common.cases import CASES
from tests.helpers import close, close_gradients, gradients, pad, tokens


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Tracing is slow, so what is traced as an encoder and as a decoder is not traced as both at once.
ONE_TOWER = {case.name for case in CASES if case.shape != "seq2seq"}
TRACED = [case for case in CASES if case.shape != "seq2seq" or case.name not in ONE_TOWER]


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
    """The traced backward pass as well."""
    model, ids = case.shared(), tokens(2, 9)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    expected = gradients(model, case.run(model, ids, use_cache=False))
    close_gradients(gradients(model, case.run(compiled, ids, use_cache=False)), expected)


@pytest.mark.parametrize("case", SOME[:1], ids=str)
@pytest.mark.slow
def test_compile_to_code(case):
    """The generated code, not the trace alone."""
    model = case.shared(torch.float32)
    ids, mask = pad([tokens(9), tokens(5, seed=1)], 9, "right")
    with torch.no_grad():
        output = case.run(torch.compile(model, fullgraph=True, dynamic=False), ids, mask)
        close(output, case.run(model, ids, mask), 1e-4)
