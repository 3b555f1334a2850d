"""A job's actor behind Serve's doors, whose league answers requests for opponents; refuses a job without a league.

serve run deployments.league:app config=four/four.yaml
"""

from brayx.cluster.serving import ServeArgs
from brayx.cluster.serving import league_app as app

__all__ = ["ServeArgs", "app"]
