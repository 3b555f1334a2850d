"""The gRPC service of `model.proto`. What stands beside it is generated; importing this alone needs no package."""
