#!/bin/bash
# Before a pod ends (preStop): Ray is told that this node goes, so that Serve starts replicas
# elsewhere and lets these finish; then it is waited until they have, or until the time is up. What
# has not ended by then goes on elsewhere from the tokens so far.
# $1: seconds that this may take.
set -uo pipefail

timeout_s=${1:-60}
proc=${HEADWATER_PROC:-/proc}
deadline=$((SECONDS + timeout_s))

# The raylet of this pod, which has the id of its node among its arguments.
node_id() {
    local file
    for file in "$proc"/[0-9]*/cmdline; do
        tr '\0' '\n' <"$file" 2>/dev/null | grep -m 1 -oE '^--node[-_]id=[0-9a-f]+' && return
    done
}

# By how a command line begins: this grep has the words in its own, too.
replicas() {
    grep -lE '^ray::ServeReplica:' "$proc"/[0-9]*/cmdline 2>/dev/null | wc -l
}

id=$(node_id | head -n 1)
id=${id#*=}
if [ -n "$id" ]; then
    # With a limit of its own: where the head has gone too, Ray waits for it.
    timeout -k 2 "${HEADWATER_DRAIN_CALL_S:-10}" ray drain-node --address "${RAY_ADDRESS:-auto}" --node-id "$id" \
        --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "its pod is ended" \
        --deadline-remaining-seconds "$timeout_s" ||
        echo "Ray does not drain this node; waiting all the same"
fi
while [ "$(replicas)" -gt 0 ] && [ "$SECONDS" -lt "$deadline" ]; do
    sleep 1
done
echo "$(replicas) replicas are left"
