"""Replay: packs fragments into learner batches (`packing`) and keeps them in a bounded buffer (`buffer`)."""
