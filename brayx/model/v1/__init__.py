"""The gRPC service of `model.proto`. The other modules here are generated; importing this one needs no package."""
