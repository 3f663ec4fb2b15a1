# SPDX-License-Identifier: Apache-2.0
"""Convolutions over tokens whose kernels are shared by the channels of a head, given or made anew for each token."""
