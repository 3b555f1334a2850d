"""Forward: batching, weights, versions, and models in this process or in a Serve deployment.

`batcher`, `versions` and `local` know nothing of Ray; `weights`, `client`, `deployment` and `remote` are its shells.
Nothing is imported here, so that a process pays only for what it uses.
"""
