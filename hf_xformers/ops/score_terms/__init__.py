# SPDX-License-Identifier: Apache-2.0
"""Attention whose scores have terms of their own."""
