"""Searches for training options: the space, the trials, and who goes on."""
