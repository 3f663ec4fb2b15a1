# SPDX-License-Identifier: Apache-2.0
"""Metrics of fine-tuning tasks, from the packages that define them (extra `train`). None needs the network."""

from .extractive import greedy_oracle
from .scores import METRICS, compute, is_error, require_packages
from .squad import normalize_answer, squad

__all__ = ["METRICS", "compute", "greedy_oracle", "is_error", "normalize_answer", "require_packages", "squad"]
