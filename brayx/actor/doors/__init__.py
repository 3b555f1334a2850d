"""Doors: the protocols a gamecore can come in by. Each turns bytes into a `StepRequest` and a reply into bytes."""
