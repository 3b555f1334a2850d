"""A model over gRPC: the methods of `brayx/model/v1/model.proto`. Knows nothing of servers or Serve.

Serve's gRPC ingress calls them on the replica by their names; so does a server of ``grpc.aio``. Errors are set on the
call, never raised, see `brayx.gamecore.grpc_status`.
"""

from __future__ import annotations

from typing import Any

from brayx.errors import BrayxError
from brayx.faults import report
from brayx.gamecore.grpc_status import refuse
from brayx.model.http import DEFAULT_MAX_BODY_BYTES, forward_packed, too_large
from brayx.model.local import LocalModel
from brayx.model.v1 import model_pb2 as pb


class ModelDoor:
    """The gRPC service ``brayx.model.v1.Model``.

    Attributes:
        model: the model.
        max_body_bytes: limit on a request's arrays. The server's own limit on a message must be higher, since what it
            refuses gets no brayx error.
    """

    model: LocalModel
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES

    # Serve passes the call's context to a method with a parameter named `grpc_context`.

    async def Describe(self, request: pb.DescribeRequest, grpc_context: Any) -> pb.Signature:
        """The model's signature."""
        spec = self.model.spec
        inputs, outputs = (
            [pb.Leaf(path=leaf.path, shape=leaf.shape, dtype=str(leaf.dtype)) for leaf in leaves]
            for leaves in (spec.inputs, spec.outputs)
        )
        return pb.Signature(inputs=inputs, outputs=outputs, policy_version=self.model.version)

    async def Forward(self, request: pb.ForwardRequest, grpc_context: Any) -> pb.ForwardReply:
        """The model's outputs for some observations."""
        try:
            if len(request.arrays) > self.max_body_bytes:
                raise too_large(self.max_body_bytes)
            version = request.version if request.HasField("version") else None
            deadline_s = request.deadline_s if request.HasField("deadline_s") else None
            return pb.ForwardReply(arrays=await forward_packed(self.model, request.arrays, version, deadline_s))
        except Exception as failure:
            error = report(failure, "the model failed", "a forward over gRPC", show_text=False, kind=BrayxError)
            refuse(grpc_context, error)
        return pb.ForwardReply()
