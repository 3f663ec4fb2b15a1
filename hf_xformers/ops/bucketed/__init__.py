# SPDX-License-Identifier: Apache-2.0
"""Attention inside buckets and clusters of tokens."""
