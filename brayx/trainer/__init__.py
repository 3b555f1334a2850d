"""The learner: its options, its state as a folder, what it does (`loop`) and where it runs (`launch`)."""
