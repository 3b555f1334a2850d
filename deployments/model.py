"""A trained model alone, without agents: forwards of its champion over HTTP and gRPC.

serve run deployments.model:app config=pipelines/templates/cartpole.yaml
"""

from brayx.cluster.model_app import ModelArgs as ModelArgs
from brayx.cluster.model_app import app as app
