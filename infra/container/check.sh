#!/usr/bin/env bash
# Builds the image for CPUs (build.sh), and runs the system in it (tests/infra/image.py), by root. Nothing of it stays.
#
#   infra/container/check.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHON=${PYTHON:-python3}

skipped() { echo "NOTICE: $*: the image is neither built nor run"; exit 0; }
[ "$(id -u)" = 0 ] || skipped "not root"
for program in buildah mmdebstrap podman crun; do
    command -v "$program" >/dev/null || skipped "no $program"
done
unshare --mount --pid --fork --mount-proc true 2>/dev/null || skipped "no namespaces can be made"

store=$(mktemp -d /var/tmp/penstock-image.XXXXXX)
trap 'rm -rf "$store"' EXIT
# In namespaces of its own: whatever is mounted or still runs in them goes with them.
unshare --mount --pid --fork --kill-child --mount-proc bash -euo pipefail -c '
    # crun refuses a mix of both versions of cgroups. Containers need none here.
    if mountpoint --quiet /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
    infra/container/build.sh "$1"
    "$PYTHON" -m tests.infra.image "$1"
' - "$store"
echo "The image was built and run in $((SECONDS / 60)) min $((SECONDS % 60)) s."
