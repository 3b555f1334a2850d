"""Networks. Torch only."""
