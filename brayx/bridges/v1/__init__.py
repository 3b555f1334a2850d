"""The messages of Unity's ML-Agents, generated from ``unity.proto``."""
