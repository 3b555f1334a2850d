# Runs a command with the settings of serve.env, and one of several lines, which an environment file cannot hold:
#     sh docker/serve.sh serve run serve_config.yaml

set -a
. "$(dirname "$0")/serve.env"
# A consistent hash: few sessions need forwarding after the number of replicas has changed.
# HAProxy waits for its timeout, at most 1 s, before it retries after a replica has ended.
RAY_SERVE_HAPROXY_BALANCE_ALGORITHM="$RAY_SERVE_HAPROXY_BALANCE_ALGORITHM
    hash-type consistent djb2 avalanche
    timeout connect 250ms"
set +a
exec "$@"
