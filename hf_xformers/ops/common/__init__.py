# SPDX-License-Identifier: Apache-2.0
"""Small helpers that several engines use."""
