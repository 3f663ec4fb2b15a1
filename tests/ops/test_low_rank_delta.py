"""RWKV-7's generalized delta rule in chunks against its recurrence, token by token."""

import pytest
import torch
from torch.nn.functional import normalize

from hf_xformers.ops.linear import low_rank_delta
from hf_xformers.ops.linear.gated_delta import gated_delta_rule
from hf_xformers.ops.linear.low_rank_delta import low_rank_delta_rule
from hf_xformers.ops.linear.reference import gated_recurrence_reference
from tests.helpers import close
from tests.pretend_cuda import OnGPU, pretend_cuda

B, H, K, V = 2, 2, 5, 3
NAMES = ("query", "key", "value", "read", "write", "log_decay", "state")


def case(length, strength=0.607, dtype=torch.float64):
    """Tokens whose corrections take back at most what is there: a key of length 1, and shares of its channels."""
    torch.manual_seed(0)
    query, key = torch.randn(2, B, H, length, K, dtype=torch.float64)
    value, state = torch.randn(B, H, length, V).double(), torch.randn(B, H, K, V).double()
    read = normalize(torch.randn_like(key), dim=-1)
    write, decay = read * torch.rand_like(key), -strength * torch.rand_like(key)
    decay[:, :, ::5] = 0.0
    tensors = (query, key, value, read, write, decay, state)
    return {name: x.to(dtype).requires_grad_() for name, x in zip(NAMES, tensors, strict=True)}


def literal(given, **options):
    given = {name: x.double() for name, x in given.items()}
    return gated_recurrence_reference(**given, **options)


def assert_same(found, expected, given, tolerance):
    ways = [torch.randn_like(x) for x in expected]
    slopes = []
    for each in (found, expected):
        loss = sum((x.double() * way).sum() for x, way in zip(each, ways, strict=True))
        slopes.append(torch.autograd.grad(loss, list(given.values()), allow_unused=True))
    for ours, theirs in zip((*found, *slopes[0]), (*expected, *slopes[1]), strict=True):
        scale = max(float(theirs.abs().max()), 1.0)
        close(ours.double() / scale, theirs.double() / scale, tolerance)


@pytest.mark.parametrize("length", [1, 2, 7, 64, 130])
@pytest.mark.parametrize("strength", [0.607, 30.0])
def test_chunks_are_the_recurrence(length, strength):
    """Outputs, last state and all gradients, of one segment and of several, which are computed again."""
    given = case(length, strength)
    for chunk_size in (3, 16, 64):
        found = low_rank_delta_rule(**given, return_state=True, chunk_size=chunk_size)
        assert_same(found, literal(given), given, 1e-11)


def test_states_joined_in_log2_steps(monkeypatch):
    """As on a device whose launches are dear."""
    monkeypatch.setattr(low_rank_delta, "in_one_batch", lambda x: True)
    given = case(50)
    found = low_rank_delta_rule(**given, return_state=True, chunk_size=4)
    assert_same(found, literal(given), given, 1e-11)


def test_launches_for_4096_tokens(monkeypatch):
    query, key, value, decay = torch.randn(4, 1, 4, 4096, 64).unbind()
    key = normalize(key, dim=-1)
    with pretend_cuda(monkeypatch) as log:
        given = [OnGPU(x).requires_grad_() for x in (query, key, value, key, key / 2, -decay.abs())]
        out = low_rank_delta_rule(*given)
        assert log.launches.total() < 110, log.launches
        out.sum().backward()
        assert log.launches.total() < 415, log.launches
        assert not log.waits and not log.copies and not log.mixed


def test_segments_keep_no_chunks(monkeypatch):
    """A text in segments gives the same, and keeps its inputs and the states between them for the gradient."""
    given, sizes = case(200), []
    monkeypatch.setattr(low_rank_delta, "segments", lambda *_: [(0, 64), (64, 128), (128, 200)])
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        found = low_rank_delta_rule(**given, return_state=True, chunk_size=16)
    assert max(sizes) <= B * H * 200 * K  # no [n, C, C], no [N, K, K]
    assert_same(found, literal(given), given, 1e-11)


@pytest.mark.parametrize("length", [1, 9])
def test_padding_and_documents(length):
    """Padded tokens, wherever they stand, leave the state; a document begins with none."""
    given = case(length)
    mask, documents = torch.ones(B, length).bool(), (torch.arange(length) // 4).expand(B, -1)
    mask[0, : length // 2], mask[1, -1:] = False, False
    for options in ({"key_padding_mask": mask}, {"segment_ids": documents}):
        found, expected = (
            low_rank_delta_rule(**given, return_state=True, chunk_size=4, **options),
            literal(given, **options),
        )
        real = options.get("key_padding_mask", torch.ones_like(mask))[:, None, :, None]
        found, expected = ((each[0] * real, each[1]) for each in (found, expected))
        assert_same(found, expected, given, 1e-11)


def test_pieces_and_types():
    """Continued from its state; in float32 near float64, with a state in float32 under autocast and of bfloat16."""
    given = case(20)
    *tokens, state = given.values()
    whole = low_rank_delta_rule(*tokens, state=state, return_state=True)
    out, pieces = [], state
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        found, pieces = low_rank_delta_rule(*(x[:, :, start:stop] for x in tokens), state=pieces, return_state=True)
        out.append(found)
    close(torch.cat(out, 2), whole[0], 1e-12)
    close(pieces, whole[1], 1e-12)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        narrow = case(20, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            found = low_rank_delta_rule(**narrow, return_state=True)
        assert found[0].dtype == dtype and found[1].dtype == torch.float32
        assert_same(found, literal(narrow), narrow, tolerance)


def test_gated_delta_rule_is_one_of_them():
    given = case(30, 5.0)
    beta, unit = 2 * torch.rand(B, H, 30).double(), given["read"]
    expected = gated_delta_rule(given["query"], unit, given["value"], beta, given["log_decay"])
    given |= {"key": beta[..., None] * unit, "write": beta[..., None] * unit, "state": None}
    close(low_rank_delta_rule(**given), expected, 1e-11)


def test_refusals():
    given = case(4)
    with pytest.raises(ValueError, match=r"read, write and log_decay must be \[B, H, T, K\]"):
        low_rank_delta_rule(**{**given, "log_decay": given["log_decay"][..., 0]})
    with pytest.raises(ValueError, match="chunk_size must be at least 1"):
        low_rank_delta_rule(**given, chunk_size=0)
