"""A job's agents and models behind Serve's doors.

serve run deployments.actor:app config=pipelines/templates/cartpole.yaml
"""

from brayx.cluster.autoscaling import BySessions
from brayx.cluster.serving import ServeArgs
from brayx.cluster.serving import actor_app as app

__all__ = ["BySessions", "ServeArgs", "app"]
