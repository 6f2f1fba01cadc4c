#!/bin/bash
# Init container `model`: a folder that every worker and frontend finds under one name, checked.
set -euo pipefail

mkdir -p "$HOME"
link=/opt/headwater-state/model
# In the pods' own image (model.image.path); elsewhere it is mounted, bundled or a hub's.
if [ -n "${MODEL_FOLDER:-}" ]; then
    ln -sfn "$MODEL_FOLDER" "$link"
fi
exec /opt/headwater/code/headwater prepare --config /etc/headwater/scripts/headwater.yaml \
    --set state.cache_dir=/opt/headwater-state/cache --link "$link"
