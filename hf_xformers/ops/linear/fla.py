# SPDX-License-Identifier: Apache-2.0
"""The kernels of flash-linear-attention (fla), where they are asked for and installed: bfloat16 on a CUDA device.

`HF_XFORMERS_FLA=1` asks for them: Triton tunes them for minutes when they first run. They are then compared with the
engines of this package on a small input, for each width and device, and left unused where they differ.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

VARIABLE = "HF_XFORMERS_FLA"
_MODULES = {
    "chunk_delta_rule": "fla.ops.delta_rule",
    "chunk_gated_delta_rule": "fla.ops.gated_delta_rule",
    "chunk_gla": "fla.ops.gla",
    "chunk_kda": "fla.ops.kda",
    "chunk_linear_attn": "fla.ops.linear_attn",
    "chunk_simple_gla": "fla.ops.simple_gla",
}
# Whether the state is corrected, and whether decays are of channels -> the kernel.
_RECURRENCES = {
    (False, False): "chunk_simple_gla",
    (False, True): "chunk_gla",
    (True, False): "chunk_gated_delta_rule",
    (True, True): "chunk_kda",
}
_WIDEST = 256  # features of a head that its kernels take
_TOLERANCE = 0.03  # of a comparison, relative to the norm
_logger = logging.getLogger(__name__)


def delta_rule_kernel(width: int, value: Tensor, engine: Callable[..., Tensor]) -> Callable | None:
    """`kernel(query, key, value, beta, mask, state)`, of features `[B, H, T, width]`, gives outputs and last state;
    None where fla does not serve. engine: the outputs of this package, with which it is compared at first."""
    return _checked("chunk_delta_rule", width, value, value.shape[3], _delta_rule, engine)


def sums_kernel(width: int, value: Tensor, columns: int, engine: Callable[..., Tensor]) -> Callable | None:
    """`kernel(query, key, value, mask)` gives `sum_{j <= i} (q_i . k_j) v_j` and the last state, as
    [`delta_rule_kernel`], for values of so many columns."""
    return _checked("chunk_linear_attn", width, value, columns, _sums, engine)


def recurrence_kernel(
    width: int, value: Tensor, corrects: bool, channels: bool, engine: Callable[..., Tensor]
) -> Callable | None:
    """`kernel(query, key, value, *beta, log_decay, state)` gives outputs and last state of a decayed scan or, where it
    `corrects`, of a gated delta rule, as [`delta_rule_kernel`]; channels: whether decays are of channels of a key."""
    name = _RECURRENCES[corrects, channels]
    return _checked(name, width, value, value.shape[3], _recurrence, engine)


def _recurrence(kernel, query, key, value, *others, state=None):
    *beta, log_decay = others
    options = {"g": log_decay.float().transpose(1, 2).contiguous()}
    if beta:
        options["beta"] = beta[0].to(value.dtype).transpose(1, 2).contiguous()
    shared = value.shape[1] // key.shape[1]
    query, key = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (query, key))
    return _call(kernel, query, key, value, None, initial_state=state, **options)


def _delta_rule(kernel, query, key, value, beta, mask=None, state=None):
    beta = beta.to(value.dtype)
    if mask is not None:
        beta = beta.masked_fill(~mask[:, None], 0.0)
    beta = beta.transpose(1, 2).contiguous()
    return _call(kernel, query, key, value, mask, beta=beta, initial_state=state)


def _sums(kernel, query, key, value, mask=None):
    return _call(kernel, query, key, value, mask, normalize=False)


def _call(kernel, query, key, value, mask, **options):
    """Tokens before heads, as fla wants them; it knows no mask, so that padding gets keys of zeros."""
    if mask is not None:
        key = key.masked_fill(~mask[:, None, :, None], 0.0)
    tokens = (x.to(value.dtype).transpose(1, 2).contiguous() for x in (query, key, value))
    with torch.autocast(value.device.type, enabled=False):
        out, state = kernel(*tokens, scale=1.0, output_final_state=True, **options)
    return out.transpose(1, 2), state


def _checked(
    name: str, width: int, value: Tensor, columns: int, run: Callable, engine: Callable[..., Tensor]
) -> Callable | None:
    served = value.is_cuda and value.dtype == torch.bfloat16 and width <= _WIDEST
    if not served or torch.compiler.is_compiling() or os.environ.get(VARIABLE, "") != "1":
        return None
    kernel, key = _kernel(name), (name, width, columns, value.device)
    if kernel is None:
        return None
    if key not in _verdicts:
        _verdicts[key] = _agrees(name, functools.partial(run, kernel), (width, width, columns), value, engine)
    return functools.partial(run, kernel) if _verdicts[key] else None


_verdicts: dict[tuple, bool] = {}


@functools.cache
def _kernel(name: str) -> Callable | None:
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except Exception as error:  # of any version and its own dependencies
        _logger.warning("flash-linear-attention is installed but left unused: %s", error)
        return None


def _agrees(name: str, run: Callable, widths: tuple[int, ...], like: Tensor, engine: Callable[..., Tensor]) -> bool:
    """Whether fla and the engine give the same outputs and gradients, on numbers of a generator of their own."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = [_numbers(which, like, width) for which, width in enumerate(widths)]
            corrects = name in ("chunk_delta_rule", "chunk_gated_delta_rule", "chunk_kda")
            if corrects:
                inputs[:2] = (torch.nn.functional.normalize(x, dim=-1) for x in inputs[:2])
                inputs.append(_numbers(3, like, 1)[..., 0].sigmoid())
            if name in _RECURRENCES.values():
                channels = name in ("chunk_gla", "chunk_kda")
                decay = torch.nn.functional.logsigmoid(_numbers(5, like, widths[0] if channels else 1).float())
                inputs.append(decay if channels else decay[..., 0])
            found = []
            for path in (lambda *given: run(*given)[0], engine):
                leaves = [x.detach().clone().requires_grad_() for x in inputs]
                out = path(*leaves)
                found.append((out, *torch.autograd.grad(out, leaves, _numbers(4, like, widths[2]))))
        apart = [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(*found, strict=True)]
        if all(each <= _TOLERANCE for each in apart):  # not so if one is NaN
            return True
        reason = f"its results differ from this package's by {max(apart):.0%}"
    except Exception as error:
        reason = str(error)
    _logger.warning("%s of flash-linear-attention is left unused for %d features: %s", name, widths[0], reason)
    return False


def _numbers(which: int, like: Tensor, width: int) -> Tensor:
    """[1, 2, 150, width], the same at every call."""
    own = torch.Generator().manual_seed(which)
    return torch.randn(1, 2, 150, width, generator=own).to(like.device, like.dtype)
