"""What several attention mechanisms use."""
