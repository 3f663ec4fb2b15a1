"""Attention through feature maps and running states."""
