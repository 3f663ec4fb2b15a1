# SPDX-License-Identifier: Apache-2.0
"""Slot `head`: from hidden states to vocabulary logits."""
