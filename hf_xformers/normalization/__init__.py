# SPDX-License-Identifier: Apache-2.0
"""Slots `normalization` and `residual` (survey 5.2): what normalizes a vector, and where in a sublayer."""
