"""Models that act: batching, weights by version, aliases of the registry, and handles for callers.

Knows nothing of Ray; `brayx.cluster` has models in Serve deployments. Nothing is imported here, so that a process loads
only what it uses.
"""
