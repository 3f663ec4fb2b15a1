# SPDX-License-Identifier: Apache-2.0
"""Parameter-free engines, a folder each: `attention.py` is the door, `reference.py` the equation, the rest private to
it."""
