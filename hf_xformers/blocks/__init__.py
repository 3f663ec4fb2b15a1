# SPDX-License-Identifier: Apache-2.0
"""Slot `block`: how sublayers are arranged in a layer."""
