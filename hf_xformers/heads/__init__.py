"""Slot `head`: from hidden states to vocabulary logits."""
