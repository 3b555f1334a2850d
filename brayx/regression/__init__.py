"""Plays recorded sessions again: through a version of the model (`replay`), or in the job's own game (`resimulate`).

`gate` refuses the promotion of a version that decides differently. Knows nothing of how sessions are recorded.
"""
