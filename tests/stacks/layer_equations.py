"""The equations of single layers, for stacks written out."""

from __future__ import annotations


def norm(module, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + module.eps).sqrt() * module.weight + module.bias


def linear(module, x):
    return x @ module.weight.T + module.bias
