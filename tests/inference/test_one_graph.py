"""One graph for texts of several lengths: `torch.compile` with free sizes makes no second one."""

import pytest
import torch

from tests.common.cases import CASES
from tests.helpers import close, pad, tokens

NAMES = ("xf_bert-encoder", "modern-decoder")


@pytest.mark.parametrize("case", [case for case in CASES if str(case) in NAMES], ids=str)
def test_one_graph_for_several_lengths(case):
    torch._dynamo.reset()
    model, graphs = case.shared(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for length in (9, 17, 23, 31):
        ids, mask = pad([tokens(length), tokens(length - 4, seed=1)], length, "right")
        with torch.no_grad():
            close(case.run(compiled, ids, mask, use_cache=False), case.run(model, ids, mask, use_cache=False))
    assert len(graphs) == 1
    torch._dynamo.reset()
