"""Vectorised environments, stepped next to the policy: no network between a game and its actions. Knows no Ray."""
