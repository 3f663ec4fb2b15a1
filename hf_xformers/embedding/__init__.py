# SPDX-License-Identifier: Apache-2.0
"""Slot `embedding`: from token ids (or given vectors) to the stack's input."""
