# SPDX-License-Identifier: Apache-2.0
"""Slot `position` (survey 5.1): how a model knows where a token stands."""
