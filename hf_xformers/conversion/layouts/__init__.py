# SPDX-License-Identifier: Apache-2.0
"""Layouts of published checkpoints for which transformers has no class any more: classes that name and hold a file's
tensors, so that it is read and checked like any other, and that compute nothing."""
