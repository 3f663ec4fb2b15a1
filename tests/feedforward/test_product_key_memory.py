"""Product-key memories against a search of all slots, the package `product-key-memory`, and what normalisation may
see."""

import pytest
import torch

from hf_xformers import build_spec
from hf_xformers.feedforward.dense import DenseFeedForward
from hf_xformers.feedforward.product_key_memory import ProductKeyMemory, TokenBatchNorm
from tests.feedforward.expert_helpers import WIDTH, build, make_config, vectors
from tests.helpers import close

SIZES = {"type": "product_key_memory", "num_heads": 2, "num_keys": 5, "topk": 3, "key_dim": 4, "layers": (1,)}
LAYER = {**SIZES, "query_norm": "layer"}


def search(module, states):
    """Every slot's score, token by token and head by head."""
    output = torch.zeros_like(states)
    n = module.num_keys
    query = module.queries(states.flatten(0, 1), torch.ones(states.shape[:2].numel(), dtype=torch.bool))
    for index, token in enumerate(query):
        total = torch.zeros(states.shape[-1], dtype=states.dtype)
        for h in range(module.num_heads):
            scores = torch.stack(
                [
                    token[h, 0] @ module.keys[h, 0, s // n] + token[h, 1] @ module.keys[h, 1, s % n]
                    for s in range(n * n)
                ]
            )
            best, slots = scores.sort(descending=True)
            weights = torch.softmax(best[: module.topk], -1)
            total = total + sum(w * module.values[s] for w, s in zip(weights, slots[: module.topk]))
        output[index // states.shape[1], index % states.shape[1]] = total
    return output


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
@pytest.mark.parametrize("topk", [1, 3, 5])
def test_formula(norm, topk):
    """The best of all n^2 slots (topk = n: every pair is a candidate)."""
    module, states = build({**SIZES, "query_norm": norm, "topk": topk}), vectors(2, 3)
    close(module(states, None).output, search(module, states))


def test_gradients():
    """Those of the search; only slots that were read get any."""
    module, states = build(LAYER), vectors(1, 2).requires_grad_()
    weights = vectors(1, 2, seed=4)
    parameters = [states, module.keys, module.values, module.query_proj.weight]
    found = torch.autograd.grad((module(states, None).output * weights).sum(), parameters)
    for one, other in zip(found, torch.autograd.grad((search(module, states) * weights).sum(), parameters)):
        close(one, other)
    read = (found[2] != 0).any(-1).sum()
    assert 0 < read <= 2 * 2 * 3 < 25


def test_same_as_the_package():
    """`product-key-memory`, weights copied: one norm for all halves, no query bias."""
    pkm = pytest.importorskip("product_key_memory", reason="the package `product-key-memory` is not installed")
    torch.manual_seed(0)
    theirs = pkm.PKM(dim=WIDTH, heads=2, num_keys=5, topk=3, dim_head=2).double().eval()
    module = build(LAYER)
    with torch.no_grad():
        theirs.norm.weight.uniform_(0.5, 1.5)
        theirs.norm.bias.uniform_(-0.5, 0.5)
        module.query_norm.load_state_dict(theirs.norm.state_dict())
        module.query_proj.bias.zero_()  # theirs is ordered (half, head, width)
        module.query_proj.weight.copy_(theirs.to_queries.weight.view(2, 2, 2, WIDTH).transpose(0, 1).reshape(8, WIDTH))
        module.keys.copy_(theirs.keys.transpose(1, 2))
        module.values.copy_(theirs.values.weight)
    states = vectors(2, 5)
    close(module(states, None).output, theirs(states))


def test_batch_norm():
    """torch's own on the real tokens alone, in training and evaluation; gradients too."""
    torch.manual_seed(0)
    ours, theirs = TokenBatchNorm(WIDTH).double(), torch.nn.BatchNorm1d(WIDTH).double()
    for seed in range(3):
        states, real = vectors(9, seed=seed).requires_grad_(), torch.arange(9) % 3 != seed
        weights = vectors(9, seed=seed + 5)[real]
        outputs = ours(states, real)[real], theirs(states[real])
        close(*outputs)
        close(*(torch.autograd.grad((output * weights).sum(), states)[0] for output in outputs))
    close(ours.running_mean, theirs.running_mean)
    close(ours.running_var, theirs.running_var)
    states = vectors(4)
    close(ours.eval()(states, torch.ones(4, dtype=torch.bool)), theirs.eval()(states))
    kept = ours.running_var.clone()
    output = ours.train()(states, torch.zeros(4, dtype=torch.bool))
    assert output.isfinite().all() and torch.equal(ours.running_var, kept)
    frozen = ours.requires_grad_(False)(states, torch.ones(4, dtype=torch.bool))
    close(frozen, theirs(states))
    assert torch.equal(ours.running_var, kept)


def test_what_a_token_depends_on():
    """Evaluation, and `layer` always: on itself. Batch normalisation in training: on the batch."""
    states = vectors(2, 4)
    other = states.clone()
    other[1, 3] = 5 * vectors(1, seed=8)[0]
    for spec, training, alone in ((SIZES, False, True), (LAYER, True, True), (SIZES, True, False)):
        module = build(spec).train(training)
        change = (module(states, None).output - module(other, None).output).abs().sum(-1)
        change[1, 3] = 0
        assert (change.max() < 1e-12) == alone


def test_added_to_the_dense_network():
    module, states = build({**LAYER, "mode": "add"}), vectors(2, 3)
    close(module(states, None).output, search(module, states) + module.ffn(states, None).output)


def test_sparse_gradients():
    """The same numbers, of the rows read alone, and an optimiser that takes them."""
    dense, sparse, states = build(LAYER), build({**LAYER, "sparse_gradients": True}), vectors(1, 2)
    for module in (dense, sparse):
        module(states, None).output.square().sum().backward()
    assert sparse.values.grad.is_sparse and sparse.values.grad.coalesce().values().shape[0] <= 12
    close(sparse.values.grad.to_dense(), dense.values.grad)
    torch.optim.SparseAdam([sparse.values]).step()


def test_sizes():
    """The paper's at its width; the middle layer; the dense form elsewhere."""
    spec = build_spec("feedforward", "product_key_memory")
    config = make_config(hidden_size=1024, num_hidden_layers=12)
    assert (spec.resolved_num_keys(config), spec.resolved_topk(config), spec.resolved_key_dim(config)) == (
        512,
        32,
        256,
    )
    config = make_config(hidden_size=16, num_hidden_layers=5)
    kinds = [type(spec.build(config, layer_idx=index)) for index in range(5)]
    assert kinds == [DenseFeedForward] * 2 + [ProductKeyMemory] + [DenseFeedForward] * 2
    module = spec.build(config, layer_idx=2)
    module.initialize(config, torch.nn.init)
    assert module.values.shape == (64, 16) and abs(module.values.std() - 0.25) < 0.03
    assert module.keys.abs().max() <= 2**-0.5
