# Runs a command with the settings of serve.env, and one with a line break, which an environment file cannot hold:
#     sh docker/serve.sh serve run serve_config.yaml

set -a
. "$(dirname "$0")/serve.env"
# A consistent hash: few sessions need forwarding after the number of replicas has changed.
RAY_SERVE_HAPROXY_BALANCE_ALGORITHM="$RAY_SERVE_HAPROXY_BALANCE_ALGORITHM
    hash-type consistent djb2 avalanche"
set +a
exec "$@"
