#!/usr/bin/env bash
# Builds the image for CPUs, penstock:cpu, without Docker, a daemon or a registry of images: buildah in a chroot, on a
# Debian that mmdebstrap makes. Both are Debian's packages. It has to be run by root.
#
#   infra/container/build.sh STORE [BUILDAH'S ARGUMENTS ...]
#
# STORE is a folder for buildah's images; `buildah --root STORE/root --runroot STORE/run images` lists them. pip takes
# its index, proxy and certificates from this machine's settings (`pip config list`). Where pip finds no build of torch
# for CPUs here, the image has that of the Containerfile's TORCH_INDEX.
set -euo pipefail
cd "$(dirname "$0")/../.."
store=$(realpath -m "$1")
shift
python=${PYTHON:-python3}
log=$store/build.log
mkdir -p "$store/pip/torch"

containers() { buildah --root "$store/root" --runroot "$store/run" "$@"; }
tell() { echo "$(date +%T) $*"; }
# What a command prints goes into a file, whose end is shown if it fails.
logged() { "$@" >>"$log" 2>&1 || { tail -n 100 "$log"; exit 1; }; }

# ---- the base: Debian's Python, with a pip that may install outside of an environment -----------------------------

# The Containerfile's own, by the name of the image that it stands in for.
tag=$(sed -n 's/^ARG PYTHON=//p' infra/container/Containerfile)
suite=${tag##*-}
base=docker.io/library/python:$tag
if ! containers inspect --type image "$base" >/dev/null 2>&1; then
    tell "make $base of Debian's packages"
    container=$(containers from scratch)
    root=$(containers mount "$container")
    # As in Docker's Debian: /usr merged without perl, and no documentation, translations or caches.
    logged mmdebstrap --mode=root --variant=minbase --include=usr-is-merged,ca-certificates,python3-venv \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --aptopt='Acquire::Retries "8"' --aptopt='Acquire::Languages "none"' \
        --aptopt='Dir::Cache { pkgcache ""; srcpkgcache ""; }' \
        --aptopt='DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb || true"; }' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' "$suite" "$root"
    chroot "$root" python3 -m venv /usr/local
    containers unmount "$container" >/dev/null
    containers config --env PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin --cmd python "$container"
    containers commit --quiet --rm "$container" "$base" >/dev/null
fi

# ---- pip's settings, as a secret of the build ---------------------------------------------------------------------

"$python" - "$store/pip" <<'PYTHON'
import shutil, subprocess, sys
from pathlib import Path

folder = Path(sys.argv[1])
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
settings = {}
for line in listed.stdout.splitlines():
    name, _, value = line.partition("=")
    settings[name.rpartition(".")[2]] = value.strip("'\"")
kept = ("index-url", "proxy", "trusted-host", "timeout", "retries")
lines = [f"{name} = {settings[name]}" for name in kept if name in settings]
if "cert" in settings:
    shutil.copy(settings["cert"], folder / "ca.crt")
    lines.append("cert = /mnt/ca.crt")
(folder / "pip.conf").write_text("\n".join(["[global]", *lines, ""]))
PYTHON
torch=$(sed '/^#/d' requirements/torch.txt)
if "$python" -m pip download --quiet --no-deps --dest "$store/pip/torch" "$torch+cpu" 2>/dev/null; then
    tell "take $torch from this machine's index"
    (cd "$store/pip/torch" && for wheel in *.whl; do echo "<a href=\"$wheel\">$wheel</a>"; done >index.html)
    set -- --build-arg TORCH_INDEX=file:///mnt "$@"
fi

# ---- the image ----------------------------------------------------------------------------------------------------

tell "build penstock:cpu"
logged containers build --isolation chroot --pull-never --layers=false --force-rm \
    --secret id=pip.conf,src="$store/pip/pip.conf" --volume "$store/pip:/mnt:ro" \
    --file infra/container/Containerfile --target cpu --tag penstock:cpu "$@" .
tell "penstock:cpu is built"
