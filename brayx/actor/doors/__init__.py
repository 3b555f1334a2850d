"""Doors: the protocols for gamecores. Each parses bytes into a `StepRequest` and writes replies as bytes."""
