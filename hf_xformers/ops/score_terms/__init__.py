"""Attention whose scores have terms of their own."""
