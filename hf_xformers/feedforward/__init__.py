# SPDX-License-Identifier: Apache-2.0
"""Slot `feedforward` (survey 5.3): the position-wise sublayer."""
