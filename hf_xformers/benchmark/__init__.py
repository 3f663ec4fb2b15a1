"""Comparing variants: time, peak memory and quality beside dense attention, in fresh processes."""

from __future__ import annotations
