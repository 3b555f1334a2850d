"""Replay: fragments in, learner batches out (`packing`), by a bounded buffer (`buffer`) and Ray Data (`source`)."""
