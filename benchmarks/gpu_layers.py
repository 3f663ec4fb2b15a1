"""One attention layer on the GPU: time and peak memory of each engine compared with SDPA, FlexAttention and fla's
kernels.

    python benchmarks/gpu_layers.py [--output_dir DIR] [--minutes 3] [--only linear,fla]

Hidden 1024, 16 heads of 64, bfloat16, one row of 1,024 to 65,536 tokens, with the layer's four projections
(`projections alone` has nothing else). The peers have the same projections around their kernel. A length is left out
where the length before it took over a second a step.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import DEVICE, Rows, milliseconds, parse, peak_mib, wanted
from torch import Tensor, nn
from transformers import initialization as init

from hf_xformers import XFormerConfig
from hf_xformers.core.call import Call
from hf_xformers.ops.linear.attention import linear_attention
from hf_xformers.ops.linear.decayed_scan import decayed_scan
from hf_xformers.ops.linear.delta_rule import delta_rule
from hf_xformers.ops.linear.fla import VARIABLE
from hf_xformers.ops.linear.gated_delta import gated_delta_rule

ON_GPU = DEVICE.type == "cuda"
WIDTH, HEADS = (1024, 16) if ON_GPU else (64, 2)
LENGTHS = (8192, 65536, 1024) if ON_GPU else (96,)  # what is compared first
WINDOW = 512 if ON_GPU else 16
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
WARM_UP = 3 if ON_GPU else 1

# case -> attention, causal, further fields of the config
CASES: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "dense": ("dense", False, {}),
    "dense, causal": ("dense", True, {}),
    "longformer": ({"type": "longformer", "attention_window": WINDOW}, False, {}),
    "sliding window, causal": ({"type": "sliding_window", "window_size": WINDOW, "sinks": 4}, True, {}),
    "band, causal": ({"type": "band_attention", "window_size": WINDOW}, True, {}),
    "band, causal, dropout 0.1": (
        {"type": "band_attention", "window_size": WINDOW},
        True,
        {"attention_probs_dropout_prob": 0.1},
    ),
    "band, causal, T5 bias": (
        {"type": "band_attention", "window_size": WINDOW},
        True,
        {"position": "t5_relative_bias"},
    ),
    "bigbird": ("bigbird", False, {}),
    "sparse transformer, causal": ("sparse_transformer", True, {}),
    "linear": ("linear_transformer", False, {}),
    "linear, causal": ("linear_transformer", True, {}),
    "performer": ("performer", False, {}),
    "performer, causal": ("performer", True, {}),
    "delta rule, 64 features": ({"type": "delta_net", "feature_map": "elu"}, True, {}),
    "delta rule, 384 features": ("delta_net", True, {}),
    "gated delta net": ("gated_delta_net", True, {}),
    "mamba2": ("mamba2", True, {}),
    "gla": ("gla", True, {}),
    "retnet": ("retnet", True, {}),
    "lolcats, causal": ("lolcats", True, {}),
    "moba": ("moba", True, {}),
    "native sparse": ("native_sparse_attention", True, {}),
    "reformer, 4 hashes": ("reformer", False, {}),
    "routing": ("routing_transformer", False, {}),
    "nystromformer": ("nystromformer", False, {}),
    "luna": ("luna", False, {}),
    "t5 bias, causal": ("dense", True, {"position": "t5_relative_bias"}),
}
# The same through fla's kernels, which other cases leave alone.
_ALSO_FLA = ("linear, causal", "delta rule, 64 features", "gated delta net")
WITH_FLA = {f"{name}, fla": CASES[name] for name in _ALSO_FLA if ON_GPU}


class Peer(nn.Module):
    """Four projections around a kernel that takes [B, T, H, d]."""

    def __init__(self, kernel: Callable[..., Tensor]):
        super().__init__()
        self.kernel = kernel
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, states: Tensor) -> Tensor:
        q, k, v = (layer(states).unflatten(-1, (HEADS, -1)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(self.kernel(q, k, v).flatten(2))


def sdpa(causal: bool) -> Callable[..., Tensor]:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return kernel


def flex(length: int) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < WINDOW)

    mask = create_block_mask(visible, None, None, length, length, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)

    return kernel


def fla_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(F.elu(q) + 1, F.elu(k) + 1, v, scale=1.0, normalize=True)[0]


def fla_delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.delta_rule import chunk_delta_rule

    strength = torch.sigmoid(k[..., 0])  # for the projection that a layer has next to these
    return chunk_delta_rule(q, k, v, strength, scale=1.0, use_qk_l2norm_in_kernel=True)[0]


def fla_gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    strength, decay = torch.sigmoid(k[..., 0]), F.logsigmoid(q[..., 0].float())
    return chunk_gated_delta_rule(q, k, v, decay, strength, scale=1.0, use_qk_l2norm_in_kernel=True)[0]


def fla_scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla(q, k, v, F.logsigmoid(q[..., 0].float()), scale=1.0)[0]


def own_operations() -> dict[str, Callable[..., Tensor]]:
    """The engines of this package on the same projections as fla's kernels, in the places of their heads."""

    def of_heads(operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v: operation(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    def decay(q: Tensor) -> Tensor:
        return F.logsigmoid(q[..., 0].float())

    return {
        "linear, causal": of_heads(lambda q, k, v: linear_attention(F.elu(q) + 1, F.elu(k) + 1, v, causal=True)),
        "delta rule": of_heads(lambda q, k, v: delta_rule(unit(q), unit(k), v, k[..., 0].sigmoid())),
        "gated delta rule": of_heads(
            lambda q, k, v: gated_delta_rule(unit(q), unit(k), v, k[..., 0].sigmoid(), decay(q))
        ),
        "decayed scan": of_heads(lambda q, k, v: decayed_scan(q, k, v, decay(q))),
    }


def tune_over_few() -> None:
    """Has Triton choose among eight configurations of a kernel, those with tiles as wide as a head, and compile them
    at once; all of them take minutes."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    def rank(config: Any) -> tuple:
        tiles = sum(abs(value - WIDTH // HEADS) for value in config.kwargs.values() if isinstance(value, int))
        return (tiles, abs(config.num_warps - 4), abs(config.num_stages - 3))

    every = Autotuner.prune_configs

    def few(self: Any, options: dict[str, Any]) -> list[Any]:
        found = sorted(every(self, options), key=rank)[:8]
        with ThreadPoolExecutor(4) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in found:
                self.fn.run(*self.nargs.values(), **{**options, "warmup": True}, **config.all_kwargs())
        return found

    Autotuner.prune_configs = few


def peer(kernel: Callable[..., Tensor]) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    torch.manual_seed(0)
    module = Peer(kernel).to(DEVICE, DTYPE)
    return module, module


def peers(length: int) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    found: dict[str, Callable[[], Callable[..., Tensor]]] = {
        "projections alone": lambda: lambda q, k, v: q + k + v,
        "SDPA": lambda: sdpa(False),
        "SDPA, causal": lambda: sdpa(True),
    }
    if ON_GPU:
        found["FlexAttention, window, causal"] = lambda: flex(length)
        kernels = {
            "linear, causal": fla_linear,
            "delta rule": fla_delta,
            "gated delta rule": fla_gated,
            "decayed scan": fla_scan,
        }
        found |= {f"fla, {name}": lambda kernel=kernel: kernel for name, kernel in kernels.items()}
    found |= {f"operation, {name}": lambda run=run: run for name, run in own_operations().items()}
    return found


def layer(attention: Any, causal: bool, fields: dict[str, Any], length: int, fla: bool) -> Callable[[Tensor], Tensor]:
    """One attention module as a function of hidden states."""
    fields = {"attention_probs_dropout_prob": 0.0, "position": "none", **fields}
    config = XFormerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_hidden_layers=1,
        intermediate_size=WIDTH,
        max_position_embeddings=length,
        attention=attention,
        is_decoder=causal,
        **fields,
    )
    module = config.attention.build(config, layer_idx=0)
    position = config.position.build(config)
    for part in (*module.modules(), *position.modules()):
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)
        if hasattr(part, "initialize"):
            part.initialize(config, init)
    module.to(DEVICE, DTYPE)
    position.to(DEVICE, DTYPE)
    index = torch.arange(length, device=DEVICE)

    def run(states: Tensor) -> Tensor:
        os.environ[VARIABLE] = "1" if fla else "0"
        context = Call(None, index[None], index, index, causal=causal, fresh=True)
        position.share(context, states)
        module.prepare(context, None)
        return module(states, context).output

    run.module = nn.ModuleList([module, position])  # type: ignore[attr-defined]
    return run


def passes(function: Callable[[Tensor], Tensor], module: nn.Module, length: int) -> tuple[Callable, Callable]:
    """A forward pass, and one with its backward pass, that have both run."""
    states = torch.randn(1, length, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)
    grad = torch.randn_like(states)

    def forward() -> None:
        with torch.no_grad():
            function(states)

    def both() -> None:
        module.zero_grad(set_to_none=True)
        states.grad = None
        function(states).backward(grad)

    for _ in range(WARM_UP):
        both()
    forward()
    return forward, both


def measure(function: Callable[[Tensor], Tensor], module: nn.Module, length: int) -> dict[str, Any]:
    forward, both = passes(function, module, length)
    return {
        "forward ms": milliseconds(forward),
        "forward + backward ms": milliseconds(both),
        "peak MiB": peak_mib(both),
    }


def own(case: tuple[Any, bool, dict[str, Any]], length: int, fla: bool) -> tuple[Callable, nn.Module]:
    torch.manual_seed(0)
    function = layer(*case, length, fla)
    return function, function.module  # type: ignore[attr-defined]


def jobs() -> list[tuple[str, int, Callable[[], tuple[Callable, nn.Module]]]]:
    found: list[tuple[str, int, Callable[[], tuple[Callable, nn.Module]]]] = []
    for length in LENGTHS:
        found += [(name, length, lambda make=make: peer(make())) for name, make in peers(length).items()]
        for cases, fla in ((CASES, False), (WITH_FLA, True)):
            found += [
                (f"hf_xformers, {name}", length, partial(own, case, length, fla)) for name, case in cases.items()
            ]
    return found


COMPILED = (
    *("fla, linear, causal", "fla, delta rule", "fla, gated delta rule", "fla, decayed scan"),
    "FlexAttention, window, causal",
    *("hf_xformers, longformer", "hf_xformers, sliding window, causal", "hf_xformers, band, causal"),
    *("hf_xformers, band, causal, T5 bias", "hf_xformers, bigbird", "hf_xformers, sparse transformer, causal"),
    *("hf_xformers, t5 bias, causal", "hf_xformers, native sparse", "hf_xformers, routing"),
)


TITLE = "One attention layer on a GPU"
NOTE = (
    "Hidden 1024, 16 heads of 64, bfloat16, one row, with the four projections of the layer; the peers (SDPA,"
    " FlexAttention with the same window of 512, fla's kernels) have the same projections around their kernel, and so"
    " have the engines of this package in rows `operation`. fla's kernels are tuned over eight configurations. Where a"
    " step takes less than about two milliseconds, it waits for launches and not for the GPU. `peak MiB`: what forward"
    " and backward need beyond what is held before them. Since these rows were measured, gated recurrences take a"
    " third of the launches, and MoBA, native sparse attention and biases by distance run in FlexAttention."
)
COLUMNS = ["case", "T", "forward ms", "forward + backward ms", "peak MiB"]


def main() -> None:
    arguments = parse(__doc__, COMPILED)
    if importlib.util.find_spec("fla") is not None:
        tune_over_few()
    if arguments.tune:
        for name, length, make in jobs():
            if name == arguments.tune:
                passes(*make(), length)
        return
    rows = Rows("gpu_layers", arguments)
    too_long: set[str] = set()
    for name, length, make in jobs():
        if name in too_long | rows.not_ready or rows.out_of_time() or not wanted(name, arguments):
            continue
        try:
            row = {"case": name, "T": length, **measure(*make(), length)}
        except Exception as error:
            row = {"case": name, "T": length, "error": f"{type(error).__name__}: {str(error)[:300]}"}
        if row.get("forward + backward ms", 2000) > 1000:
            too_long.add(name)
        rows.add(row)
        if ON_GPU:
            torch.cuda.empty_cache()
    rows.rows.sort(key=lambda row: row["T"])
    rows.store()
    rows.page(TITLE, NOTE, COLUMNS)


if __name__ == "__main__":
    main()
