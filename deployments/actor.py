"""A job's agents and models behind Serve's doors.

serve run deployments.actor:app config=pipelines/templates/cartpole.yaml
"""

from brayx.cluster.actor_app import ServeArgs as ServeArgs
from brayx.cluster.actor_app import app as app
