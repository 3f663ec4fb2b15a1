"""A tensor that says it is on a GPU while its numbers are on the processor, for machines without one.

Code that branches by device takes the GPU's way with such tensors, and a log tells what that would have cost: kernels
launched, points where the host waits for the device, copies from one to the other, and operations whose operands are
on different devices.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
WAITS = "_local_scalar_dense nonzero masked_select _unique2 unique_dim equal bincount is_nonzero".split()
# Operations that compute nothing: another look at the same memory, or memory without numbers.
VIEWS = (
    "view _unsafe_view as_strided transpose permute expand slice select unsqueeze squeeze detach alias split "
    "split_with_sizes chunk unbind diagonal t unfold reshape empty empty_like new_empty empty_strided "
    "new_empty_strided lift_fresh _reshape_alias"
).split()


class Log:
    """What happened since it was cleared; waits, copies and mixed are counted by operation and place."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.launches, self.waits, self.copies, self.mixed = Counter(), Counter(), Counter(), Counter()
        self.largest = 0  # numbers of one tensor that was made

    def note(self, kind: Counter, name: str) -> None:
        kind[f"{name} at {_place()}"] += 1


def _place() -> str:
    """The line of the package, or else of transformers, that is being run."""
    frame, other = sys._getframe(2), "elsewhere"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/hf_xformers/" in file:
            return f"{file.split('/hf_xformers/')[-1]}:{frame.f_lineno}"
        if other == "elsewhere" and "/transformers/" in file:
            other = f"transformers/{file.split('/transformers/')[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return other


LOG = Log()


class OnGPU(torch.Tensor):
    """Wraps `inner`, a tensor on the processor."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="cpu",
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def __deepcopy__(self, memo):
        return OnGPU(self.inner.detach().clone()).requires_grad_(self.requires_grad)

    def __repr__(self):
        return f"OnGPU({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.namespace == "hf_xformers":  # the body of a custom operator
            from torch._library.custom_ops import OPDEFS

            return OPDEFS[f"{func.namespace}::{func._schema.name.split('::')[1]}"]._init_fn(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        _note(name, args, kwargs)
        plain_args, plain_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
        if plain_kwargs.get("device") is not None:
            plain_kwargs["device"] = "cpu"
        if func is torch.ops.aten.bmm.dtype:
            return OnGPU(torch.bmm(plain_args[0].float(), plain_args[1].float()))
        if func is torch.ops.aten.baddbmm.dtype_out:
            into, left, right = plain_args[:3]
            plain_kwargs["out"].copy_(into.baddbmm(left.float(), right.float(), alpha=kwargs.get("alpha", 1)))
            return kwargs["out"]
        out = tree_map(_outer, func(*plain_args, **plain_kwargs))
        if name.strip("_") not in VIEWS:
            LOG.largest = max([LOG.largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))])
        return return_and_correct_aliasing(func, args, kwargs, out)


def _inner(x):
    return x.inner if isinstance(x, OnGPU) else x


def _outer(x):
    return OnGPU(x) if isinstance(x, torch.Tensor) and not isinstance(x, OnGPU) else x


def _note(name: str, args, kwargs) -> None:
    if name.strip("_") not in VIEWS and name not in VIEWS:
        LOG.launches[name] += 1
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    plain = [x for x in tensors if not isinstance(x, OnGPU) and x.dim() and x.numel()]
    indexed = name in ("index", "index_put", "index_put_", "_index_put_impl_")
    if name in WAITS or (indexed and any(x.dtype == torch.bool for x in args[1] if x is not None)):
        LOG.note(LOG.waits, name)
    elif plain and (name in ("copy_", "_to_copy") or indexed):
        LOG.note(LOG.copies, name)
    elif plain and any((x != 0).any() for x in plain):  # zeros may be gradients that autograd made itself
        LOG.note(LOG.mixed, f"{name} of {[tuple(x.shape) for x in plain]}")


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, to_gpu):
        ctx.came_from_gpu = isinstance(x, OnGPU)
        moved = _inner(x).detach().clone()
        return OnGPU(moved) if to_gpu else moved

    @staticmethod
    def backward(ctx, grad):
        return (_outer if ctx.came_from_gpu else _inner)(grad), None


def to_gpu(x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(x, OnGPU) else _Move.apply(x, True)


FACTORIES = (
    "empty zeros ones full arange tensor as_tensor asarray scalar_tensor eye linspace rand randn randint randperm "
    "tril_indices triu_indices empty_strided logspace empty_like zeros_like ones_like full_like rand_like randn_like "
    "randint_like"
).split()


def _kind(device) -> str | None:
    return None if device is None else torch.device(device).type


def _factory(name: str):
    """A function that is told a device."""
    make = getattr(torch, name)

    def made(*args, **kwargs):
        if _kind(kwargs.get("device")) != "cuda":
            return make(*args, **kwargs)
        out = make(*args, **{**kwargs, "device": "cpu"})
        if name in ("tensor", "as_tensor", "asarray") and not isinstance(args[0], OnGPU) and out.numel():
            LOG.note(LOG.copies, name)
        elif not name.startswith("empty"):
            LOG.launches[name] += 1
        if isinstance(out, OnGPU):
            return out
        return OnGPU(out.detach()).requires_grad_() if out.requires_grad else OnGPU(out)

    return made


def _moves(to=torch.Tensor.to):
    def moved(x, *args, device=None, other=None, **kwargs):
        rest = list(args)
        if rest and isinstance(rest[0], (torch.device, str)):
            device = rest.pop(0)
        elif rest and isinstance(rest[0], torch.Tensor):
            other = rest.pop(0)
        if other is not None:
            device, kwargs["dtype"] = other.device, other.dtype
        there = isinstance(x, OnGPU)
        if device is not None and (_kind(device) == "cuda") != there:
            if x.dim():
                LOG.note(LOG.copies, "to")
            x = _Move.apply(x, not there)
        return to(x, *rest, **kwargs) if rest or kwargs else x

    return moved


def _told(name: str):
    """Tells the host what is in a tensor."""
    tell = getattr(torch.Tensor, name)

    def told(x, *args, **kwargs):
        if isinstance(x, OnGPU):
            LOG.note(LOG.waits, name)
        return tell(_inner(x), *args, **kwargs)

    return told


def _beside(make):
    """A function that makes numbers where its first argument is; what it makes of Python's is a copy."""

    def made(x, *args, **kwargs):
        if not isinstance(x, OnGPU):
            return make(x, *args, **kwargs)
        if make.__name__ == "new_tensor":
            LOG.note(LOG.copies, "new_tensor")
        return OnGPU(make(x.inner, *args, **kwargs))

    return made


class _Generator:
    real = torch.Generator

    def __new__(cls, device="cpu"):
        return cls.real()


def on_gpu(model: nn.Module) -> nn.Module:
    """The model, moved."""
    moved = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    new = nn.Parameter(OnGPU(parameter.data), requires_grad=parameter.requires_grad)
                    moved[id(parameter)] = (new, parameter)
                module._parameters[name] = moved[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _outer(buffer)
    return model


@contextlib.contextmanager
def pretend_cuda(monkeypatch):
    """Within it, `device="cuda"` makes such tensors. Gives the log."""
    monkeypatch.setattr(torch, "Generator", _Generator)
    fork = torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda *a, enabled=True, **k: fork(devices=[], enabled=enabled))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: torch.set_rng_state(state))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    for name in FACTORIES:
        monkeypatch.setattr(torch, name, _factory(name))
    monkeypatch.setattr(torch.Tensor, "to", _moves())
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self, *a, **k: self.to("cpu"))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *a, **k: self.to(GPU))
    for owner, name in ((torch.Tensor, "new_tensor"), (torch.nn.functional, "one_hot")):
        monkeypatch.setattr(owner, name, _beside(getattr(owner, name)))
    for name in ("tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _told(name))
    LOG.clear()
    yield LOG
    monkeypatch.undo()
    for module in [module for name, module in sys.modules.items() if name.startswith("hf_xformers.")]:
        for kept in vars(module).values():  # a device that is there must not find such tensors
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()
