# SPDX-License-Identifier: Apache-2.0
"""How rotary frequencies are stretched for texts longer than those of pretraining.

Pair i of r rotated channels turns by m * f_i at position m, plainly with f_i = theta^(-2i/r). Each form here gives
other f_i, in float32, and a factor on cosines and sines.
"""

from __future__ import annotations

import functools
import math
from typing import ClassVar, dataclass_transform

import torch
from torch import Tensor

from ..core.call import can_inspect
from ..core.components import bounded
from ..core.specs import Registry, TypedSpec, build_in, register_in
from ..ops.common.constants import constant


class RotaryScaling(TypedSpec):
    """Base of the forms. by_length: frequencies depend on how many tokens a text has so far, so that the same key
    turns otherwise in a longer text: caches keep keys as they are, and each call turns all of them (a recurrent state
    cannot, so that decoders that have one refuse it). A cached text is still not read as the same text in one pass
    where it has grown past the length at which frequencies change: what upper layers have cached was made of states
    that lower layers had read with the frequencies before. whole_heads: it is for whole heads, some of whose pairs
    stand still."""

    by_length: ClassVar[bool] = False
    whole_heads: ClassVar[bool] = False

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        """f [B or 1, r / 2] in radians per position, float32.

        Args:
            theta: base.
            width: r, rotated channels.
            length: of the longest text that the model is for (`max_position_embeddings`).
            tokens: [B or 1], of each text so far.
        """
        raise NotImplementedError

    def amplitude(self, length: int) -> float:
        """Factor on cosines and sines."""
        return 1.0

    def check_width(self, width: int) -> None:
        """Raises `ValueError` where the fields do not fit `width` rotated channels."""


SCALINGS: Registry[RotaryScaling] = Registry("scaling", room="position", kind="rotary scaling")


@dataclass_transform(kw_only_default=True)
def _register(name: str):
    def wrap(cls: type[RotaryScaling]) -> type[RotaryScaling]:
        return register_in(SCALINGS, cls, name)

    return wrap


def build_scaling(value: dict | str | RotaryScaling | None, asked: str = "scaling") -> RotaryScaling | None:
    """The form that a name, a dict with `type` or such an object stands for; None: none.

    Raises:
        TypeError: a field has a wrong type.
        ValueError: unknown type or field, or a value out of range.
    """
    return None if value is None else build_in(SCALINGS, value, asked)


def plain_frequencies(theta: float | Tensor, width: int, device: torch.device) -> Tensor:
    """theta^(-2i/r) for i < r / 2; theta: a number, or float64 [B] -> [1 or B, r / 2]."""
    exponent = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    if isinstance(theta, Tensor):
        return 1.0 / theta.to(torch.float32)[:, None] ** exponent
    return (1.0 / float(theta) ** exponent)[None]


def both_ways(frequencies: Tensor, interleaved: bool) -> Tensor:
    """f [B or 1, r / 2] -> [B or 1, 1, 1, r], -f for the first channel of each pair and f for the second: cosines of
    both are the same, and sines have the signs with which a pair turns."""
    if interleaved:
        return torch.stack((-frequencies, frequencies), dim=-1).flatten(-2)[:, None, None]
    return torch.cat((-frequencies, frequencies), dim=-1)[:, None, None]


def _made_frequencies(theta: float, width: int, device: torch.device, interleaved: bool) -> Tensor:
    return both_ways(plain_frequencies(theta, width, device), interleaved)


@functools.lru_cache(maxsize=16)
def _kept_frequencies(theta: float, width: int, device: torch.device, interleaved: bool) -> Tensor:
    with torch.inference_mode(False):  # for calls that record gradients as well
        return _made_frequencies(theta, width, device, interleaved)


def known_frequencies(theta: float, width: int, like: Tensor, interleaved: bool) -> Tensor:
    """Frequencies [`both_ways`] on the device of `like`, made once and not in every call. Where a graph is recorded,
    or shapes alone are worked out, nothing is kept."""
    kept = can_inspect() and type(like) is Tensor
    return (_kept_frequencies if kept else _made_frequencies)(theta, width, like.device, interleaved)


def _check_factor(spec: RotaryScaling, factor: float | None, at_least: float = 1.0) -> None:
    if factor is not None and factor < at_least:
        raise ValueError(f"Rotary scaling {spec.type!r} needs `factor` >= {at_least:g}, got {factor}.")


def _check_length(spec: RotaryScaling, length: int | None) -> None:
    if length is not None and length < 1:
        raise ValueError(
            f"Rotary scaling {spec.type!r} needs `original_max_position_embeddings` >= 1 token, got {length}."
        )


@_register("linear")
class LinearScaling(RotaryScaling):
    """f_i / s: positions are pressed together by s = `factor` (Chen et al. 2023, arXiv 2306.15595, eq. 4)."""

    factor: float | int

    def check_fields(self) -> None:
        _check_factor(self, self.factor)

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        return plain_frequencies(theta, width, tokens.device) / self.factor


@_register("dynamic")
class DynamicScaling(RotaryScaling):
    """A larger theta for texts of more than L tokens, L the config's `max_position_embeddings`: for l tokens theta' =
    theta (s l / L - (s - 1))^(r / (r - 2)) (NTK-aware, dynamic; Peng et al. 2023, arXiv 2309.00071, section 3.3 and
    the authors' code)."""

    by_length = True

    factor: float | int

    def check_fields(self) -> None:
        _check_factor(self, self.factor)

    def check_width(self, width: int) -> None:
        if width < 4:
            raise ValueError(f"Rotary scaling 'dynamic' needs at least 4 rotated channels, got {width}.")

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        stretch = self.factor * tokens.double().clamp(min=length) / length - (self.factor - 1)
        return plain_frequencies(theta * stretch ** (width / (width - 2)), width, tokens.device)


@_register("yarn")
class YarnScaling(RotaryScaling):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.4): pairs that turn more than `beta_fast` times within L
    tokens stay as they are, those that turn less than `beta_slow` times are divided by s, and between them the two are
    mixed along a line over i; cosines and sines are multiplied by 0.1 ln(s) + 1.

    Args:
        factor: s; None: max_position_embeddings / L.
        original_max_position_embeddings: L, tokens of pretraining.
        attention_factor: on cosines and sines (None: as above).
        mscale, mscale_all_dim: the quotient (0.1 mscale ln(s) + 1) / (0.1 mscale_all_dim ln(s) + 1) takes its place
            where both are given (DeepSeek).
        truncate: the line begins and ends at whole i.
    """

    original_max_position_embeddings: int
    factor: float | int | None = None
    attention_factor: float | int | None = None
    beta_fast: float | int = 32.0
    beta_slow: float | int = 1.0
    mscale: float | int | None = None
    mscale_all_dim: float | int | None = None
    truncate: bool = True

    def check_fields(self) -> None:
        _check_factor(self, self.factor)
        _check_length(self, self.original_max_position_embeddings)
        if not self.beta_fast > self.beta_slow > 0:
            raise ValueError(
                "Rotary scaling 'yarn' needs `beta_fast` > `beta_slow` > 0, got"
                f" {self.beta_fast} and {self.beta_slow}."
            )

    def _factor(self, length: int) -> float:
        return length / self.original_max_position_embeddings if self.factor is None else self.factor

    def amplitude(self, length: int) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        logarithm = math.log(max(self._factor(length), 1.0))
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * logarithm + 1.0) / (0.1 * self.mscale_all_dim * logarithm + 1.0)
        return 0.1 * logarithm + 1.0

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        def pair_of(turns: float) -> float:
            """The i whose pair turns that often within L tokens."""
            within = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return width * math.log(within) / (2 * math.log(theta))

        begin, end = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, width - 1)
        end = end + 0.001 if begin == end else end
        pairs = torch.arange(width // 2, device=tokens.device, dtype=torch.float32)
        kept = 1 - ((pairs - begin) / (end - begin)).clamp(0, 1)
        plain = plain_frequencies(theta, width, tokens.device)
        return plain / self._factor(length) * (1 - kept) + plain * kept


@_register("longrope")
class LongRopeScaling(RotaryScaling):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): f_i / lambda_i with factors that were searched for, one set for
    texts of at most L tokens and one for longer ones; cosines and sines are multiplied by sqrt(1 + ln(s) / ln(L)).

    Args:
        short_factor, long_factor: lambda, one for each pair.
        original_max_position_embeddings: L.
        factor: s; None: max_position_embeddings / L.
        attention_factor: on cosines and sines (None: as above).
    """

    by_length = True

    short_factor: tuple[float | int, ...]
    long_factor: tuple[float | int, ...]
    original_max_position_embeddings: int
    factor: float | int | None = None
    attention_factor: float | int | None = None

    def check_fields(self) -> None:
        _check_factor(self, self.factor, 0.0)
        _check_length(self, self.original_max_position_embeddings)

    def check_width(self, width: int) -> None:
        for name in ("short_factor", "long_factor"):
            found = len(getattr(self, name))
            if found != width // 2:
                raise ValueError(
                    f"Rotary scaling 'longrope' needs one number in `{name}` for each of {width // 2} pairs of rotated"
                    f" channels, got {found}."
                )

    def amplitude(self, length: int) -> float:
        if self.attention_factor is not None:
            return float(self.attention_factor)
        original = self.original_max_position_embeddings
        factor = length / original if self.factor is None else self.factor
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        exponent = torch.arange(0, width, 2, device=tokens.device, dtype=torch.float32) / width
        short, long = (
            1.0 / (constant(factors, tokens.device, torch.float32) * float(theta) ** exponent)
            for factors in (self.short_factor, self.long_factor)
        )
        return torch.where((tokens > self.original_max_position_embeddings)[:, None], long, short)


@_register("llama3")
class Llama3Scaling(RotaryScaling):
    """Llama 3.1 (Meta's released code): with the wavelength w_i = 2 pi / f_i and L tokens of pretraining, pairs of w_i
    < L / `high_freq_factor` stay, those of w_i > L / `low_freq_factor` are divided by `factor`, and between them the
    two are mixed by (L / w_i - low) / (high - low)."""

    factor: float | int
    original_max_position_embeddings: int
    low_freq_factor: float | int = 1.0
    high_freq_factor: float | int = 4.0

    def check_fields(self) -> None:
        _check_factor(self, self.factor)
        _check_length(self, self.original_max_position_embeddings)
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "Rotary scaling 'llama3' needs `high_freq_factor` > `low_freq_factor` > 0, got"
                f" {self.high_freq_factor} and {self.low_freq_factor}."
            )

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        plain = plain_frequencies(theta, width, tokens.device)
        turns = self.original_max_position_embeddings / (2 * math.pi / plain)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        mixed = (1 - kept) * plain / self.factor + kept * plain
        return torch.where(kept > 1, plain, torch.where(kept < 0, plain / self.factor, mixed))


@_register("proportional")
class ProportionalScaling(RotaryScaling):
    """The first `proportion` of the pairs of whole heads turn by theta^(-2i/d) / s, d the head width; the others stand
    still (Gemma 4's layers that read everything). factor: s."""

    whole_heads = True

    proportion: float | int = bounded(1.0, above=0, most=1)
    factor: float | int = 1.0

    def check_fields(self) -> None:
        _check_factor(self, self.factor)

    def frequencies(self, theta: float, width: int, length: int, tokens: Tensor) -> Tensor:
        pairs = torch.arange(width // 2, device=tokens.device)
        turning = pairs < int(self.proportion * width // 2)
        return plain_frequencies(theta, width, tokens.device).where(turning, 0.0) / self.factor
