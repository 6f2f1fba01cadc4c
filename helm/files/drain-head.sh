#!/bin/bash
# Before the head ends (preStop): it stays while other nodes live, or until the time is up. When a
# whole cluster ends, they hand over what runs there, for which they need Ray's control plane and
# Serve's controller, both of them here. A head that moves alone serves on meanwhile.
# $1: seconds that this may take.
set -uo pipefail

deadline=$((SECONDS + ${1:-60}))

# Only where Ray says so: an answer that fails or hangs tells nothing.
others_are_gone() {
    local nodes
    nodes=$(timeout -k 2 "${HEADWATER_LIST_CALL_S:-10}" ray list nodes --filter state=ALIVE --format json 2>/dev/null)
    [[ $nodes == *'"is_head_node": true'* && $nodes != *'"is_head_node": false'* ]]
}

until others_are_gone || [ "$SECONDS" -ge "$deadline" ]; do
    sleep "${HEADWATER_LIST_PAUSE_S:-3}"
done
