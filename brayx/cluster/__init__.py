"""The host on Ray: a job's parts as Serve replicas, named actors, Ray Train workers and Ray Data streams.

Every import of Ray is in this package, and in `deployments`, which builds Serve applications.
"""

NAMESPACE = "brayx"
"""Ray namespace of the named actors: a Serve replica, a driver and a notebook must use the same one."""
