"""Forward: batching, weights, and models in this process or in a Serve deployment.

`batcher` and `local` know nothing of Ray; `weights`, `remote` and `deployment` are its shells. Nothing is imported
here, so that a process pays only for what it uses.
"""
