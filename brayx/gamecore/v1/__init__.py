"""The gRPC service of `gamecore.proto`. The other files here are generated; importing this alone needs no package."""

ERROR_METADATA = "brayx-error-bin"
"""Trailing metadata that holds the error's document when ``Step`` answers with a status other than OK."""
