# SPDX-License-Identifier: Apache-2.0
"""The families of transformers that convert, one file each: a file dropped in is found."""
