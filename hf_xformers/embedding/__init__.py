"""Slot `embedding`: from token ids (or given vectors) to the stack's input."""
