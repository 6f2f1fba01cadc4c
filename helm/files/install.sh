#!/bin/bash
# Init container `install`: Headwater's code from the layer, and its hashed lock from a package
# index, into a volume of the pod. Runs as any user, in Ray's own image; needs no compiler.
set -euo pipefail

root=${HEADWATER_ROOT:-/opt/headwater}
archive=${HEADWATER_LAYER:-/etc/headwater/layer/layer.tar.xz}

say() { printf '%s\n' "$*" >&2; }

mkdir -p "$HOME" "$root/lib"
if [ ! -r "$archive" ]; then
    say "there is no $archive: the ConfigMap that layer.configMap names lacks the key layer.tar.xz"
    exit 1
fi
# By Python: Ray's image has no xz.
python3 -m tarfile -e "$archive" "$root"

# vLLM's CPU build is linked to it, and neither Ray's image nor the wheel has it.
has_numa() { python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }

# A package's files without installing it, which only root could.
unpack_numa() {
    local work
    work=$(mktemp -d)
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
    local options=(
        -o "Dir::State=$work" -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache"
        -o "APT::Sandbox::User=" -o "Debug::NoLocking=1"
    )
    # Chained: `set -e` is off in what is itself a condition.
    (
        cd "$work" &&
            apt-get "${options[@]}" -qq update &&
            apt-get "${options[@]}" -qq download libnuma1 &&
            dpkg-deb -x libnuma1_*.deb files
    ) >&2 || return 1
    find "$work/files" -name 'libnuma.so.1*' -exec cp -a {} "$root/lib/" \;
    rm -rf "$work"
}

if [ "${HEADWATER_BUILD:-cpu}" = cpu ] && ! has_numa; then
    say "Fetching libnuma1"
    unpack_numa && has_numa || {
        say "libnuma.so.1 is missing and could not be fetched: build an image from helm/images, and"
        say "set image.repository to it and layer.enabled to false"
        exit 1
    }
fi

# As many as the container has cores: the node's may be hundreds, and each takes memory.
export HEADWATER_COMPILE_JOBS=2
# The launcher makes the environment; the command that it then runs is the lightest.
exec "$root/code/headwater" config >/dev/null
