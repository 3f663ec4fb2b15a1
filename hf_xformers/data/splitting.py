"""The one rule by which a document is held out for validation: a hash of its text or name, never its position.

A position-based rule gives other splits when a dataset is streamed, sharded over workers or reordered, and so lets
validation text leak into training; a hash does not, and it keeps equal texts on one side.
"""

from __future__ import annotations

import hashlib


def stable_fraction(key: str, seed: int = 0) -> float:
    """A number in [0, 1) that depends on `key` and `seed` only: equal on every machine, Python version and process."""
    digest = hashlib.blake2b(
        key.encode("utf-8", errors="surrogatepass"), digest_size=8, key=str(seed).encode()
    ).digest()
    # 53 bits are what a float holds exactly; more could round up to 1.0.
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def check_fraction(validation_fraction: float) -> None:
    """Raises ValueError unless 0 <= validation_fraction < 1."""
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction} is not in [0, 1); it is the share of the documents that is "
            "held out, for instance 0.05, or 0 for no validation split"
        )
