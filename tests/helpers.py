"""What several test folders share: tiny configs, parameters that make every term count, comparisons, gradients."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.tiny_configs import FIRST_FREE_ID, VOCAB, tiny_kwargs

PAD = 0
NO_DROPOUT = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "activation_dropout_prob": 0.0,
    "classifier_dropout": 0.0,
}
_OVERRIDES = json.loads((Path(__file__).parent / "conformance" / "overrides.json").read_text())


def tiny_fields(config_class: type, kind: str = "encoder", **changes: Any) -> dict[str, Any]:
    """Arguments for a tiny config of any class: sizes found by name, as for the conformance run, then `changes`."""
    overrides: dict[str, Any] = {}
    for pattern, entry in _OVERRIDES.items():
        if fnmatchcase(config_class.model_type, pattern):
            overrides.update(entry.get("config", {}))
    fields, _ = tiny_kwargs(config_class, overrides, kind)
    fields.setdefault("pad_token_id", PAD)
    return {**fields, **changes}


@torch.no_grad()
def make_strong(model: nn.Module, seed: int = 1, amount: float = 0.1) -> nn.Module:
    """Adds noise to every parameter, so that scores, biases, gates and norms all matter in a comparison: at their
    usual start attention is nearly uniform, and a bug in it would hide below the tolerance."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * amount
        parameter.add_(noise.to(parameter.dtype))
    return model


@torch.no_grad()
def randomized(module: nn.Module, amount: float = 0.3) -> nn.Module:
    """In float64, with random numbers in every parameter: a module that is built alone leaves those that its
    `initialize` sets as it found them."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.double().eval().parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * amount)
    return module


def tokens(*shape: int, seed: int = 0, low: int = FIRST_FREE_ID, high: int = VOCAB) -> Tensor:
    """Random ids without special tokens."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def aligned(model):
    """The model with its weights in fresh memory. Those that were loaded lie where the file has them, and on some
    processors the last bit of a product depends on how its operands are aligned."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    """Equal up to `tolerance`, absolute and relative."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(model: nn.Module, output: Tensor, seed: int = 3) -> dict[str, Tensor]:
    """Gradients of a random linear form of `output` by parameter name; zeros where a parameter takes no part."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
    names, parameters = zip(*model.named_parameters())
    found = torch.autograd.grad((output * weights).sum(), parameters, allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for name, parameter, gradient in zip(names, parameters, found)
    }


def close_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-8) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            actual[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def pad(rows: list[Tensor], length: int, side: str, seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of ids [T_i] padded to `length` on `side` -> ids and mask [B, length]. With `seed` the padding holds random
    tokens instead of the padding token, which must not matter."""
    ids = torch.full((len(rows), length), PAD) if seed is None else tokens(len(rows), length, seed=seed)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(length - len(row), length)
        ids[index, where], mask[index, where] = row, 1
    return ids, mask
