"""What is made once and kept: never with inference mode's tensors or a graph's, and no more than so much."""

import pytest
import torch

from hf_xformers.ops.binary_partition import leaf_tiles, listed_spans
from hf_xformers.ops.block_sparse.few_rows import _seen_by_few
from hf_xformers.ops.block_sparse.flex import _block_map
from hf_xformers.ops.block_sparse.op import make_pieces
from hf_xformers.ops.block_sparse.patterns import band, global_, random_blocks
from hf_xformers.ops.common.kept import kept
from tests.helpers import close
from tests.mixes.check import tensors_in

CPU, LENGTH = torch.device("cpu"), 71  # a length that no other test has
PATTERN = (band(3, 3) | global_(2) | random_blocks(2, 4, seed=1)).bind(LENGTH)


def test_kept():
    made = []

    @kept(2)
    def count(number, device):
        made.append(number)
        return torch.full((number,), 1.0, device=device)

    with torch.inference_mode():
        first = count(3, CPU)
    assert not first.is_inference() and count(3, CPU) is first
    assert [len(count(number, CPU)) for number in (4, 5, 3)] == [4, 5, 3] and made == [3, 4, 5, 3]
    close(torch.compile(lambda: count(6, CPU) + 1, backend="eager", fullgraph=True)(), torch.full((6,), 2.0))


@pytest.mark.parametrize(
    "make, arguments",
    [
        (listed_spans, (LENGTH, False, CPU)),
        (leaf_tiles, (LENGTH, 2, 3, True, CPU)),
        (make_pieces, (PATTERN, True, (2, 2), (LENGTH, LENGTH, 0), (0, 0))),
        (_block_map, (PATTERN, 2, (LENGTH, LENGTH), (0, 0), True, CPU)),
        (_seen_by_few, (PATTERN, 2, True, (9, 12), 0, LENGTH, CPU)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_nothing_of_inference_mode(make, arguments):
    with torch.inference_mode():
        make(*arguments)
    found = list(tensors_in(make(*arguments), depth=6))
    assert found and not any(tensor.is_inference() for tensor in found)
