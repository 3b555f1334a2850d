"""League: players, matchmaking, payoff, ratings, gates and snapshots, and the books that keep them.

Pure: knows nothing of asyncio, torch, Ray, MLflow, sessions' owners or doors.
"""
