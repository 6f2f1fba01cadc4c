#!/bin/bash
# Init container `model`: a folder that every worker and frontend finds under one name, checked.
set -euo pipefail

mkdir -p "$HOME"
link=/opt/headwater-state/model
# In the pods' own image (model.image.path); elsewhere it is mounted, bundled or a hub's.
if [ -n "${MODEL_FOLDER:-}" ]; then
    ln -sfn "$MODEL_FOLDER" "$link"
fi
# The pod's own, for the commands inside it, too: what a release has in common is the newest one's,
# while pods of the cluster before may still be made.
printf '%s\n' "$MODEL_CONFIG" >"$HOME/headwater.yaml"
exec "${HEADWATER_ROOT:-/opt/headwater}/code/headwater" prepare --config "$HOME/headwater.yaml" \
    --set state.cache_dir=/opt/headwater-state/cache --link "$link"
