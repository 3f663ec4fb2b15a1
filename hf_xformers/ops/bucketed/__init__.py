"""Attention inside buckets and clusters of tokens."""
