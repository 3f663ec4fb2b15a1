# SPDX-License-Identifier: Apache-2.0
"""Slot `stack`: how layers form a network. The depth loop is a component."""
