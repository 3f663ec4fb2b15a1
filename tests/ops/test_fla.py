"""Kernels of flash-linear-attention, with a stand-in for the library: used where they serve and agree, and left with
a warning where they do not."""

import importlib.machinery
import sys
import types

import pytest
import torch
from torch.nn.functional import normalize

from hf_xformers.ops.linear import fla
from hf_xformers.ops.linear.attention import delta_rule, delta_rule_reference, linear_attention
from hf_xformers.ops.linear.decayed_scan import decayed_scan
from hf_xformers.ops.linear.gated_delta import gated_delta_rule
from hf_xformers.ops.linear.reference import gated_recurrence_reference
from tests.pretend_cuda import OnGPU, pretend_cuda


@pytest.fixture
def library(monkeypatch):
    """A stand-in as the library has it: tokens before heads. `library.factor` spoils what it gives."""
    made = types.SimpleNamespace(calls=[], factor=1.0)

    def chunk_delta_rule(q, k, v, beta, scale, initial_state=None, output_final_state=False):
        made.calls.append("delta rule")
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        out, state = delta_rule_reference(q * scale, k, v, beta.transpose(1, 2).float(), state=initial_state)
        return made.factor * out.transpose(1, 2).bfloat16(), state

    def chunk_linear_attn(q, k, v, scale, normalize, output_final_state=False):
        made.calls.append("sums")
        assert not normalize
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        out = (q * scale @ k.mT).tril() @ v
        return made.factor * out.transpose(1, 2).bfloat16(), None

    def recurrence(corrects):
        def run(q, k, v, g, scale, beta=None, initial_state=None, output_final_state=False):
            made.calls.append("gated delta rule" if corrects else "scan")
            q, k, v, g = (x.transpose(1, 2).float() for x in (q, k, v, g))
            beta = beta.transpose(1, 2).float() if corrects else None
            out, state = gated_recurrence_reference(q * scale, k, v, g, beta=beta, state=initial_state)
            return made.factor * out.transpose(1, 2).bfloat16(), state

        return run

    recurrences = {
        "simple_gla": ("chunk_simple_gla", False), "gla": ("chunk_gla", False), "kda": ("chunk_kda", True),
        "gated_delta_rule": ("chunk_gated_delta_rule", True),
    }  # fmt: skip
    for folder, (name, corrects) in recurrences.items():
        module = types.ModuleType(f"fla.ops.{folder}")
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        setattr(module, name, recurrence(corrects))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    functions = {"fla": None, "fla.ops.delta_rule": chunk_delta_rule, "fla.ops.linear_attn": chunk_linear_attn}
    for name, function in functions.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        if function is not None:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(fla, "_verdicts", {})
    monkeypatch.setenv(fla.VARIABLE, "1")
    fla._kernel.cache_clear()
    yield made
    fla._kernel.cache_clear()


def inputs(dtype=torch.bfloat16):
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(2, 2, 40, 16), dim=-1).to(dtype) for _ in range(2))
    mask = torch.arange(40)[None] >= torch.tensor([[0], [7]])
    return q, k, torch.randn(2, 2, 40, 8).to(dtype), torch.rand(2, 2, 40), mask


def both(monkeypatch, dtype=torch.bfloat16):
    """Outputs of the two engines on what says it is a GPU."""
    with pretend_cuda(monkeypatch):
        q, k, v, beta, mask = (OnGPU(x) for x in inputs(dtype))
        options = {"key_padding_mask": mask}
        out = delta_rule(q, k, v, beta, **options), linear_attention(q.abs(), k.abs(), v, causal=True, **options)
    return [x.inner.double() for x in out]


def expected():
    q, k, v, beta, mask = inputs()
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    written, _ = delta_rule_reference(q, k, v, beta, key_padding_mask=mask)
    return written, linear_attention(q.abs(), k.abs(), v, causal=True, key_padding_mask=mask)


def test_kernels_are_used_where_they_agree(library, monkeypatch):
    for found, wanted in zip(both(monkeypatch), expected(), strict=True):
        assert ((found - wanted).norm() / wanted.norm()).item() < 1e-2
    assert library.calls == ["delta rule", "delta rule", "sums", "sums"]  # the comparison, and the call


def test_kernels_that_differ_are_left_with_one_warning(library, monkeypatch, caplog):
    library.factor = 1.1
    for found, wanted in zip([*both(monkeypatch), *both(monkeypatch)], [*expected(), *expected()], strict=True):
        assert ((found - wanted).norm() / wanted.norm()).item() < 1e-2
    assert library.calls == ["delta rule", "sums"]
    assert [record.message.split(" of ")[0] for record in caplog.records] == ["chunk_delta_rule", "chunk_linear_attn"]


def test_kernels_are_left_for_other_types_and_where_told(library, monkeypatch):
    both(monkeypatch, torch.float32)
    monkeypatch.setenv(fla.VARIABLE, "")
    both(monkeypatch)
    delta_rule(*inputs()[:4])
    assert library.calls == []


@pytest.mark.parametrize("corrects, channels, factor", [
    (False, False, 1.0), (False, True, 1.0), (True, False, 1.0), (True, True, 1.0), (True, False, 1.1),
])  # fmt: skip
def test_gated_recurrences(library, monkeypatch, corrects, channels, factor):
    """Of fewer heads of queries than of values, with padding; not of packed documents, whose borders are infinite."""
    library.factor = factor
    q, k, v, beta, mask = inputs()
    v, beta = (torch.cat([x, x.flip(1)], dim=1) for x in (v, beta))
    decay = torch.nn.functional.logsigmoid(torch.randn(2, 4, 40, *([16] if channels else [])))
    strengths, documents = (beta,) if corrects else (), torch.zeros(2, 40, dtype=torch.long)
    run = gated_delta_rule if corrects else decayed_scan
    with pretend_cuda(monkeypatch):
        given = [OnGPU(x) for x in (q, k, v, *strengths, decay)]
        found = run(*given, key_padding_mask=OnGPU(mask)).inner.double()
        used = len(library.calls)
        run(*given, key_padding_mask=OnGPU(mask), segment_ids=OnGPU(documents))
    options = {"beta": beta.double() if corrects else None, "key_padding_mask": mask}
    expected, _ = gated_recurrence_reference(*(x.double() for x in (q, k, v, decay)), **options)
    assert ((found - expected).norm() / expected.norm()).item() < 2e-2
    assert used == len(library.calls) == (2 if factor == 1.0 else 1)
