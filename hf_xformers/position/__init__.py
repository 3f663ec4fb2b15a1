"""Slot `position` (survey 5.1): how a model knows where a token stands."""
