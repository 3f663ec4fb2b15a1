"""Graphormer: shortest paths and the bias by loops over pairs, and inputs that do not fit."""

import itertools
import random

import pytest
import torch

from examples.graphs import ring_graphs
from hf_xformers import XFormerConfig
from hf_xformers.core.graph_inputs import NO_EDGE, UNREACHABLE
from hf_xformers.data.graphs import Graph, GraphCollator, shortest_paths
from hf_xformers.position.base import PositionTables
from hf_xformers.variants import family
from tests.attention.score_helpers import HEADS, make_context, small_blocks, vectors
from tests.helpers import close, make_strong
from tests.position.term_helpers import D_HEAD, build, projected

GRAPH_ID, HOPS = 9, 3
SPEC = {"type": "graphormer", "num_distances": 6, "num_edge_types": 4, "max_hops": HOPS}
TREE = Graph((3, 4, 5, 3, 4, 5), ((0, 1), (1, 2), (2, 3), (3, 4)), (1, 2, 3, 0))  # node 5 stands alone
SIZES = dict(
    vocab_size=12,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    position=SPEC,
    embedding={"type": "token", "id_tables": (("in_degree", 5), ("out_degree", 5))},
)
collate = GraphCollator(GRAPH_ID, max_hops=HOPS, max_degree=4)


def walk(graph, start, end):
    """All shortest paths as lists of edge types, by trying every order of intermediate nodes."""
    steps = {}
    for (a, b), kind in zip(graph.edges, graph.edge_types or (0,) * len(graph.edges), strict=True):
        steps[a, b] = steps[b, a] = kind
    others = [node for node in range(len(graph.nodes)) if node not in (start, end)]
    for between in range(len(others) + 1):
        found = []
        for middle in itertools.permutations(others, between):
            route = list(itertools.pairwise((start, *middle, end)))
            if all(step in steps for step in route):
                found.append([steps[step] for step in route])
        if found:
            return found
    return []


def test_shortest_paths():
    """Against all simple paths of random graphs."""
    drawn = random.Random(0)
    for _ in range(6):
        pairs = [pair for pair in itertools.combinations(range(6), 2) if drawn.random() < 0.35]
        graph = Graph((2,) * 6, tuple(pairs), tuple(drawn.randrange(4) for _ in pairs))
        lengths, paths = shortest_paths(graph, HOPS)
        for i, j in itertools.permutations(range(6), 2):
            routes = walk(graph, i, j)
            assert lengths[i, j] == (len(routes[0]) if routes else UNREACHABLE)
            cut = [(route[:HOPS] + [NO_EDGE] * HOPS)[:HOPS] for route in routes or [[]]]
            assert paths[i, j].tolist() in cut
        assert (lengths.diagonal() == 0).all() and (paths.diagonal() == NO_EDGE).all()


def bias_by_hand(module, graph, edges):
    """[H, n + 1, n + 1], the graph's token first."""
    size, count = len(graph.nodes) + 1, module.spec.num_distances
    bias = torch.zeros(HEADS, size, size).double()
    for i, j in itertools.product(range(size), repeat=2):
        if 0 in (i, j):
            bias[:, i, j] = module.distances.weight[count + 1]
            continue
        routes = [[]] if i == j else walk(graph, i - 1, j - 1)
        if not routes:
            bias[:, i, j] = module.distances.weight[count]
            continue
        route = routes[0]
        bias[:, i, j] = module.distances.weight[min(len(route), count - 1)]
        for hop, kind in enumerate(route[:HOPS]):
            if edges:
                bias[:, i, j] += module.edges.weight[kind] @ module.hops[hop] / min(len(route), HOPS)
    return bias


@pytest.mark.parametrize("edges", [True, False])
def test_bias_of_a_tree(edges):
    """Paths are unique in a tree; some are longer than the hops that count."""
    batch = collate([TREE])
    layer, module, _ = build({**SPEC, "edges": edges})
    expected = bias_by_hand(module, TREE, edges).detach()
    close(module.of_pairs(batch["spatial_pos"], batch["edge_paths"])[0].detach(), expected)
    states, inputs = vectors(1, 7), {name: batch[name] for name in ("spatial_pos", "edge_paths")}
    query, key, value = projected(layer, states)
    weights = torch.softmax(query @ key.mT / D_HEAD**0.5 + expected, dim=-1)
    for path in ("eager", "sdpa"):
        with small_blocks(2):
            context = make_context(7, implementation=path, inputs=inputs)
            context.keep(PositionTables(module))
            layer.prepare(context, None)
            output = layer(states, context).output
        close(output, layer.o_proj((weights @ value).transpose(1, 2).flatten(2)))
    slopes = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    assert all(slope.abs().max() > 1e-9 for slope in slopes)


def model(head="Model", **more):
    torch.manual_seed(0)
    config = XFormerConfig(**{**SIZES, **more})
    return make_strong(family("xformer")[head](config).double().eval(), amount=0.3)


def test_padding_and_order_of_nodes():
    graph = Graph((3, 4, 5, 6, 3), ((0, 1), (1, 2), (2, 3), (1, 4)), (1, 2, 3, 0))
    order = [3, 0, 4, 1, 2]  # node k of the new graph is node order[k] of the old one
    place = {old: new for new, old in enumerate(order)}
    moved = Graph(
        tuple(graph.nodes[old] for old in order), tuple((place[a], place[b]) for a, b in graph.edges), graph.edge_types
    )
    net = model()
    one = net(**collate([graph])).last_hidden_state[0]
    other = net(**collate([moved])).last_hidden_state[0]
    close(other[1:], one[1:][order])
    close(other[0], one[0])
    padded = net(**collate([graph, TREE])).last_hidden_state
    close(padded[0, :6], one)
    close(padded[1], net(**collate([TREE])).last_hidden_state[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spatial_pos": torch.zeros(1, 7, 6, dtype=torch.long)}, r"`spatial_pos` must be \[batch, length, length\]"),
        ({"spatial_pos": torch.full((1, 7, 7), -3)}, "got -3"),
        (
            {"spatial_pos": torch.zeros(1, 9, 9).long(), "edge_paths": torch.zeros(1, 9, 9, 3).long()},
            "is not of the 7 tokens",
        ),
        (
            {"edge_paths": torch.zeros(1, 7, 7, dtype=torch.long)},
            r"`edge_paths` must be \[batch, length, length, hops\]",
        ),
        ({"edge_paths": torch.full((1, 7, 7, 3), 4)}, "edge type 4, but this graphormer has 4"),
    ],
)
def test_wrong_inputs(change, message):
    with pytest.raises(ValueError, match=message):
        model()(**{**collate([TREE]), **change})


def test_refusals():
    with pytest.raises(ValueError, match=r"edges between them, from 0 on, got \(0, 5\)"):
        Graph((1, 2), ((0, 5),))
    with pytest.raises(ValueError, match="`edge_types` has one number for each of 1 edges"):
        Graph((1, 2), ((0, 1),), (1, 2))
    with pytest.raises(ValueError, match="at least 6 nodes"):
        ring_graphs(2, 5)
