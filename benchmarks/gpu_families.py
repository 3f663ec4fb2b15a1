"""Every family on the GPU against the same model on the processor.

    python benchmarks/gpu_families.py [--output_dir DIR] [--minutes 3] [--only performer,engine]

Tiny models with noise on all weights, a batch with padding on the left. For each family and shape: logits and
gradients in float32 and bfloat16 (relative distance from the processor's float32; `processor bf16`: the processor's
own distance), six tokens generated with the cache against the same without it, and for each family one step of
`Trainer` in bfloat16. Then ten models compiled, and the engines' kernels (FlexAttention, flash-linear-attention)
against the literal equations in float64.
"""

from __future__ import annotations

import copy
import json
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from gpu_common import DEVICE, RESULTS, Rows, parse, wanted
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORKERS = 14 if DEVICE.type == "cuda" else 1
COMPILED = (
    *("xf_bert-encoder", "xf_gpt2-decoder", "modern-decoder", "xf_longformer-encoder", "xf_performer-encoder"),
    *("xf_linear_transformer-decoder", "xf_delta_net-decoder", "xf_t5-seq2seq", "xf_switch_transformer-encoder"),
    "windows_and_norms-decoder",
)


def relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-12))


def passes(case: Any, model: nn.Module, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the real tokens, and all gradients of a random linear form of them as one vector."""
    logits = case.run(model, ids, mask)
    if isinstance(logits, tuple):
        logits = logits[0]
    real = logits[:, :][mask[:, -logits.shape[1] :].bool()] if logits.ndim == 3 else logits
    weights = torch.randn(real.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    model.zero_grad(set_to_none=True)
    (real.float() * weights.to(real.device, torch.float32)).sum().backward()
    gradients = [
        p.grad.float().flatten() if p.grad is not None else p.new_zeros(p.numel()).float() for p in model.parameters()
    ]
    return real.detach().float(), torch.cat([gradient.cpu() for gradient in gradients])


def generates_alike(case: Any, model: nn.Module, ids: Tensor, mask: Tensor) -> bool:
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask, "eos_token_id": None}
    return torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


def trainer_step(model: nn.Module, ids: Tensor) -> float:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in ids.cpu()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=1,
            per_device_train_batch_size=len(rows),
            report_to="none",
            save_strategy="no",
            bf16=DEVICE.type == "cuda",
            use_cpu=DEVICE.type == "cpu",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.remove_callback(PrinterCallback)
        return trainer.train().training_loss


def check(case: Any, with_trainer: bool) -> dict[str, Any]:
    from tests.helpers import tokens

    ids, mask = tokens(2, 24, seed=5), torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    row: dict[str, Any] = {"case": str(case)}
    own = case.build(dtype=torch.float32)
    expected = passes(case, own, ids, mask)
    there = ids.to(DEVICE), mask.to(DEVICE)
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        try:
            got = passes(case, copy.deepcopy(own).to(DEVICE, dtype), *there)
            row[f"{name} logits"], row[f"{name} gradients"] = map(relative, got, expected)
            if dtype == torch.bfloat16:
                got = passes(case, copy.deepcopy(own).to(dtype), ids, mask)
                row["processor bf16"] = relative(got[0], expected[0])
        except Exception as error:  # a row for each fault, and the others continue
            row[f"{name} error"] = _told(error)
    model = copy.deepcopy(own).to(DEVICE)
    if case.causal:
        try:
            row["cached"] = generates_alike(case, model, *there)
        except Exception as error:
            row["generation error"] = _told(error)
    if with_trainer:
        try:
            row["trainer loss"] = trainer_step(model, there[0])
        except Exception as error:
            row["trainer error"] = _told(error)
    return row


def _told(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"


def compiled(case: Any) -> dict[str, Any]:
    from tests.helpers import tokens

    model = case.build(dtype=torch.float32).to(DEVICE)
    ids, mask = tokens(2, 24, seed=5).to(DEVICE), torch.ones(2, 24, dtype=torch.long, device=DEVICE)
    begun = time.monotonic()
    try:
        expected = passes(case, model, ids, mask)
        got = passes(case, torch.compile(model), ids, mask)
        return {
            "case": f"{case}, compiled",
            "fp32 logits": relative(got[0], expected[0]),
            "seconds": time.monotonic() - begun,
        }
    except Exception as error:
        return {"case": f"{case}, compiled", "compile error": _told(error)}


# ------------------------------------------------------------------------------------------------ engines


def _with_gradients(function: Callable, inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    grads = torch.autograd.grad((out * weights.to(out)).sum(), leaves)
    return [out, torch.cat([grad.flatten().double() for grad in grads])]


def engines() -> Iterator[tuple[str, Callable, Callable, list[Tensor]]]:
    """Name, the fast function, the literal one, and their inputs in float64 on the processor."""
    from hf_xformers.ops.block_sparse import patterns
    from hf_xformers.ops.block_sparse.attention import block_sparse_attention, block_sparse_reference
    from hf_xformers.ops.linear.attention import linear_attention
    from hf_xformers.ops.linear.decayed_scan import decayed_scan
    from hf_xformers.ops.linear.delta_rule import delta_rule
    from hf_xformers.ops.linear.gated_delta import gated_delta_rule
    from hf_xformers.ops.linear.reference import (
        delta_rule_reference,
        gated_recurrence_reference,
        linear_attention_reference,
    )

    generator = torch.Generator().manual_seed(0)
    length = 321 if DEVICE.type == "cuda" else 40
    size = (2, 4, length, 64 if DEVICE.type == "cuda" else 16)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(3))
    segments = torch.arange(length).expand(2, -1) // 70
    table = torch.randn(1, 2 * length + 1, generator=generator, dtype=torch.float64)
    masks = {"": None, ", padded left": torch.arange(length) >= torch.tensor([[0], [70 * length // 321]])}
    masks[", padded right"] = ~masks[", padded left"].flip(0)
    kept = {
        "band": patterns.band(60, 60),
        "dilated": patterns.dilated(20, 20, 3),
        "strided": patterns.strided(16),
        "fixed": patterns.fixed(32, 4),
        "global and random": patterns.global_(2) | patterns.band(32, 32) | patterns.random_blocks(2, 16),
    }
    terms: dict[str, dict[str, Any]] = {
        "band, documents": {"segment_ids": segments},
        "band, capped": {"score_cap": 2.0},
        "band, bias": {"score_bias": partial(_bias, table), "bias_is_relative": True},
    }
    sparse = [(name, pattern, {"causal": causal}) for name, pattern in kept.items() for causal in (False, True)]
    sparse += [
        (f"band, padded {side}", kept["band"], {"causal": True, "key_padding_mask": masks[f", padded {side}"]})
        for side in ("left", "right")
    ]
    sparse += [(name, kept["band"], {"causal": True, **options}) for name, options in terms.items()]
    for name, pattern, options in sparse:

        def fast(q, k, v, pattern=pattern, options=options):
            given = {key: x.to(q.device) if isinstance(x, Tensor) else x for key, x in options.items()}
            return block_sparse_attention(q, k, v, pattern, **given)

        def literal(q, k, v, pattern=pattern, options=options):
            return block_sparse_reference(q, k, v, pattern, **options)[0]

        yield f"{name}{', causal' if options['causal'] else ''}", fast, literal, [q, k, v]
    for label, mask in masks.items():
        for causal in (False, True):

            def fast(q, k, v, causal=causal, mask=mask):
                given = None if mask is None else mask.to(q.device)
                return linear_attention(q, k, v, causal=causal, key_padding_mask=given)

            def literal(q, k, v, causal=causal, mask=mask):
                return linear_attention_reference(q, k, v, causal=causal, key_padding_mask=mask)

            yield f"linear{', causal' if causal else ''}{label}", fast, literal, [q.exp(), k.exp(), v]
        beta = torch.rand(size[:3], generator=generator, dtype=torch.float64)
        unit = [nn.functional.normalize(x, dim=-1) for x in (q, k)]

        def fast(q, k, v, beta, mask=mask):
            return delta_rule(q, k, v, beta, key_padding_mask=None if mask is None else mask.to(q.device))

        def literal(q, k, v, beta, mask=mask):
            return delta_rule_reference(q, k, v, beta, key_padding_mask=mask)

        yield f"delta rule{label}", fast, literal, [*unit, v, beta]
        for decay_of in ("token", "channel"):
            decay = -3 * torch.rand(size if decay_of == "channel" else size[:3], generator=generator).double()

            def scan(q, k, v, decay, mask=mask):
                return decayed_scan(q, k, v, decay, key_padding_mask=None if mask is None else mask.to(q.device))

            def gated(q, k, v, beta, decay, mask=mask):
                given = None if mask is None else mask.to(q.device)
                return gated_delta_rule(q, k, v, beta, decay, key_padding_mask=given)

            def literal(q, k, v, *others, mask=mask):
                *beta, decay = others
                beta = beta[0] if beta else None
                return gated_recurrence_reference(q, k, v, decay, beta=beta, key_padding_mask=mask)

            yield f"scan, decay of a {decay_of}{label}", scan, literal, [q, k, v, decay]
            yield f"gated delta rule, decay of a {decay_of}{label}", gated, literal, [*unit, v, beta, decay]


def _bias(table: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
    """[..., 1, q, k] of distances."""
    distances = k_at.unsqueeze(-2) - q_at.unsqueeze(-1) + table.shape[1] // 2
    return table.to(k_at.device)[:, distances].movedim(0, -3)


def check_engine(name: str, fast: Callable, literal: Callable, inputs: list[Tensor]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": f"engine: {name}"}
    expected = None
    for dtype, kind in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        rounded = [x.to(dtype) for x in inputs]
        try:
            if expected is None or dtype == torch.bfloat16:
                expected = _with_gradients(lambda *x: _first(literal(*x)), [x.double() for x in rounded])
            got = _with_gradients(lambda *x: _first(fast(*x)), [x.to(DEVICE) for x in rounded])
            row[f"{kind} logits"], row[f"{kind} gradients"] = map(relative, got, expected)
        except Exception as error:
            row[f"{kind} error"] = _told(error)
    return row


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


# ------------------------------------------------------------------------------------------------ driver


def jobs(arguments: Any) -> list[Callable[[], dict[str, Any]]]:
    """Everything that is to be done, what no earlier run has seen first."""
    from tests.common.cases import CASES

    cases = [case for case in CASES if wanted(str(case), arguments)]
    seen = RESULTS / "gpu_families.json"
    known = {row["case"] for row in json.loads(seen.read_text())["rows"]} if seen.exists() else set()
    cases.sort(key=lambda case: str(case) in known)  # should time run short, what no run has reached is there
    cases = cases if DEVICE.type == "cuda" else cases[:3]
    found: list[Callable[[], dict[str, Any]]] = []
    names, operations = [case.name for case in cases], list(engines())
    operations.sort(key=lambda each: f"engine: {each[0]}" in known)
    found += [partial(check, case, names.index(case.name) == number) for number, case in enumerate(cases)]
    found += [partial(check_engine, *each) for each in operations if wanted(f"engine: {each[0]}", arguments)]
    found += [partial(compiled, case) for case in cases if str(case) in COMPILED]
    return found


def work(worker: int, following: Any, arguments: Any, end: float, found: Any) -> None:
    """Takes the job whose number comes next, until all are done or time is up."""
    torch.set_num_threads(1)
    every = jobs(arguments)
    while True:
        with following.get_lock():
            number, following.value = following.value, following.value + 1
        if number >= len(every):
            break
        if time.time() > end:
            found.put({"case": f"worker {worker}", "note": "out of time"})
            break
        found.put(every[number]())
    found.put(None)


TITLE = "Every family on a GPU"
NOTE = (
    "Tiny models with noise on all weights, two rows of 24 tokens, one with padding on the left. `fp32` and `bf16`:"
    " distance of logits and of all gradients from the processor's float32, relative to their norm; `processor bf16`:"
    " the processor's own distance in bfloat16. `cached`: six generated tokens are the same with and without a cache."
    " `trainer loss`: of one step of `Trainer` in bfloat16, one model a family. Rows `engine` compare one operation of"
    " 321 tokens with its literal equation in float64."
)
COLUMNS = [
    *("case", "fp32 logits", "fp32 gradients", "bf16 logits", "bf16 gradients", "processor bf16", "cached"),
    *("trainer loss", "seconds"),
]


def main() -> None:
    arguments = parse(__doc__)
    rows = Rows("gpu_families", arguments)
    end = time.time() + 60 * arguments.minutes
    context = multiprocessing.get_context("spawn")
    following = context.Value("i", 0)
    if WORKERS == 1:
        found: Any = queue.Queue()
        work(0, following, arguments, end, found)
    else:
        found = context.Queue()
        for worker in range(WORKERS):
            context.Process(target=work, args=(worker, following, arguments, end, found), daemon=True).start()
    left = WORKERS
    while left:
        try:
            row = found.get(timeout=60 * arguments.minutes + 60)
        except Exception:
            rows.add({"case": "driver", "note": f"{left} workers gave no sign"})
            break
        if row is None:
            left -= 1
        else:
            bad = any("error" in key for key in row) or row.get("fp32 logits", 0) > 1e-3 or row.get("cached") is False
            bad = bad or not row.get("bf16 gradients", 0) < 0.5  # nan, too
            rows.add(row, shown=bad)
    rows.page(TITLE, NOTE, COLUMNS)
    print(f"{len(rows.rows)} rows in {rows.path}")


if __name__ == "__main__":
    main()
