"""The learner: its options, its state as a folder, and its loop. `brayx.local.learner` and `brayx.cluster.learner` run it."""
