"""Small helpers that several engines use."""
