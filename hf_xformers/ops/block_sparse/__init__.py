# SPDX-License-Identifier: Apache-2.0
"""Attention over patterns of positions, block by block."""
