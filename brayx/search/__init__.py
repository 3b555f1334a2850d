"""Searches for training options: the space of options, the trials, and the choice of those that continue."""
