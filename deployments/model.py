"""A trained model alone, without agents: forwards of its champion over HTTP and gRPC.

serve run deployments.model:app config=pipelines/templates/cartpole.yaml
"""

from brayx.cluster.serving import ModelArgs
from brayx.cluster.serving import model_app as app

__all__ = ["ModelArgs", "app"]
