# SPDX-License-Identifier: Apache-2.0
"""Attention through feature maps and running states."""
