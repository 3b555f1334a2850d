"""The learner: its options, its state as a folder, and its loop. `local.learner` and `cluster.learner` run it."""
