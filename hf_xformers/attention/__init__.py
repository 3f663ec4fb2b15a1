# SPDX-License-Identifier: Apache-2.0
"""Slot `attention` (survey 4): how tokens read each other. One file per mechanism; see `base.py` for the contract."""
