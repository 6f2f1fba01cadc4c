#!/bin/bash
# Readiness of a worker pod: an engine stands here, and its link listens. Each worker leaves a file
# that names its process (deployments/workers/ready_file.py); one whose process has ended does not
# count. With Serve's proxy in front, that answers, too.
set -uo pipefail

ready=0
for file in "${TMPDIR:-/tmp}/headwater-$(id -u)"/ready-*; do
    [ -e "$file" ] && [ -d "/proc/${file##*-}" ] && ready=$((ready + 1))
done
if [ "$ready" -eq 0 ]; then
    echo "no worker of this pod is ready"
    exit 1
fi
if [ -n "${HEADWATER_PROXY_PORT:-}" ]; then
    exec 3<>"/dev/tcp/127.0.0.1/$HEADWATER_PROXY_PORT" || exit 1
    printf 'GET /-/healthz HTTP/1.0\r\n\r\n' >&3
    IFS= read -r -t 3 status <&3
    case $status in
        *' 200 '*) ;;
        *)
            echo "Serve's proxy answers: $status"
            exit 1 ;;
    esac
fi
echo "$ready workers are ready"
