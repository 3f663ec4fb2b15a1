"""Linear attention with folded projections against values and weights written out."""

import pytest
import torch

from hf_xformers.ops.linear.attention import folded_sums, read_folded_sums
from hf_xformers.ops.linear.feature_maps import elu_plus_one
from hf_xformers.ops.linear.reference import folded_attention_reference
from tests.ops.linear_forms import numbers

HEADS, DEPTH, OF_VALUES, STATES, OUT = 3, 4, 5, 7, 6


def inputs(queries: int, keys: int, biases: bool):
    made = {
        "query": numbers(2, queries, HEADS * DEPTH, seed=1),
        "key": numbers(2, keys, HEADS * DEPTH, seed=2),
        "states": numbers(2, keys, STATES, seed=3),
        "value": numbers(HEADS * OF_VALUES, STATES, seed=4),
        "output": numbers(OUT, HEADS * OF_VALUES, seed=5),
    }
    if biases:
        made |= {"value_bias": numbers(HEADS * OF_VALUES, seed=6), "output_bias": numbers(OUT, seed=7)}
    return made


def folded(made, **options):
    eps = options.pop("eps", 0.0)
    value, output = ((made[name], made.get(f"{name}_bias")) for name in ("value", "output"))
    query, key = (by_head(made[name]) for name in ("query", "key"))
    return read_folded_sums(query, folded_sums(key, made["states"], *value, **options), *output, eps=eps)


def twin(made, mask, eps):
    query, key = (by_head(made[name]) for name in ("query", "key"))
    value, output = ((made[name], made.get(f"{name}_bias")) for name in ("value", "output"))
    return folded_attention_reference(query, key, made["states"], *value, *output, key_padding_mask=mask, eps=eps)


def by_head(projected):
    return projected.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def written_out(made, mask, eps):
    """Every weight of every pair; values and outputs of heads for every token."""
    values = torch.nn.functional.linear(made["states"], made["value"], made.get("value_bias"))
    q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (elu_plus_one(made["query"]), elu_plus_one(made["key"]), values))
    weights = torch.einsum("bihf,bjhf->bhij", q, k) * (1.0 if mask is None else mask[:, None, None])
    sums = weights.sum(-1, keepdim=True) + eps
    mixed = torch.einsum("bhij,bjhd->bihd", weights / torch.where(sums == 0, 1.0, sums), v).flatten(2)
    return torch.nn.functional.linear(mixed, made["output"], made.get("output_bias"))


@pytest.mark.parametrize("eps", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (9, 5), (300, 301)], ids=str)
def test_equals_the_literal_form(lengths, masked, eps):
    biases = masked == (eps == 0.0)
    made, mask = inputs(*lengths, biases), None
    if masked:
        mask = torch.rand(2, lengths[1], generator=torch.Generator().manual_seed(8)) > 0.4
        mask[1] = False  # nobody to read: the bias alone
    found, expected = folded(made, key_padding_mask=mask, eps=eps), written_out(made, mask, eps)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    torch.testing.assert_close(twin(made, mask, eps), expected, atol=1e-11, rtol=1e-11)
    if masked:
        bias = made.get("output_bias", torch.zeros(OUT).double())
        torch.testing.assert_close(found[1], bias.expand_as(found[1]))
    probe = numbers(*expected.shape, seed=9).detach()
    ours, theirs, twins = (
        torch.autograd.grad((x * probe).sum(), list(made.values())) for x in (found, expected, twin(made, mask, eps))
    )
    for name, *pair in zip((*made, *made), (*ours, *twins), (*theirs, *theirs), strict=True):
        torch.testing.assert_close(*pair, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_what_is_kept():
    """Beside the states: features of keys, weights of queries, a number for each query and head; keys, queries, values
    and outputs of heads are not."""
    made, sizes = inputs(600, 600, True), []

    def pack(tensor):
        sizes.append((tensor.untyped_storage().data_ptr(), tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        folded(made)
    given = {made[name].untyped_storage().data_ptr(): name for name in made}
    large = sorted(str(given.get(place, size // 1200)) for place, size in sizes if size >= 1200)
    assert large == sorted(["states", str(HEADS * DEPTH), str(HEADS * DEPTH), str(HEADS)])


def test_refusals():
    made = inputs(9, 5, True)
    with pytest.raises(ValueError, match="boolean tensor of shape"):
        folded(made, key_padding_mask=torch.ones(2, 9).bool())
    with pytest.raises(RuntimeError, match="no second derivative.*eager"):
        torch.autograd.grad(folded(made).square().sum(), made["query"], create_graph=True)
