# Runs a command with the settings of serve.env, and with what an environment file has no place for:
#     sh docker/serve.sh serve run serve_config.yaml

set -a
. "$(dirname "$0")/serve.env"
# Consistent: few sessions are passed on between replicas after their number has changed.
RAY_SERVE_HAPROXY_BALANCE_ALGORITHM="$RAY_SERVE_HAPROXY_BALANCE_ALGORITHM
    hash-type consistent djb2 avalanche"
set +a
exec "$@"
