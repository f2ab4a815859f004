#!/usr/bin/env bash
# Tests and measures the engine on a machine with an NVIDIA GPU, in parts that each take less than 9 minutes.
#
#   infra/gpu/check.sh [PART]... [--out DIR] [--measures LIST] [--allow-cpu]
#
#   bench    the shape of Llama 3.1 8B, bf16, random weights: steps, prefill, offline, and where the time goes
#   peer     transformers' continuous batching beside it, on the same requests
#   alone    attention, the other kernels, and sampling, each measured alone
#   kernels  tests: every kernel against kernels/reference, the device's runner
#   parity   tests: transformers' output in fp32 and bf16
#   engine   the rest of the engine's tests
#   all      all of them in this order: figures first (the default)
#
# Of the tests, those run that need the GPU (`pytest -k cuda`). Needs Python 3.11+ (PYTHON, default python3) with torch,
# triton, transformers, tokenizers, safetensors, jinja2, numpy, pytest, pytest-xdist, pytest-timeout and hypothesis; no
# network, no other package. --measures chooses those of bench (infra/gpu/bench.py lists them). What each part finds, and
# what Triton compiles, goes to --out (default: gpu-report in the repository); report.json, report.txt and report.md
# there hold all parts that were ever run, and are written after each part, also when it is ended before its time. Exits
# 0 if every test of the parts that were asked for passed and every figure was taken. --allow-cpu does the same on a CPU,
# with a tiny model and with all tests.
set -uo pipefail

every=(bench peer alone kernels parity engine)
usage() {
    local IFS='|'
    echo "usage: infra/gpu/check.sh [${every[*]}|all]... [--out DIR] [--measures LIST] [--allow-cpu]" >&2
    exit 2
}

root=$(cd "$(dirname "$0")/../.." && pwd) || exit 2
python=${PYTHON:-python3}
out=$root/gpu-report
measures=decode:1,decode:16,decode:64,decode:256,prefill,profile,offline,host
allow_cpu=no
parts=()
while [ $# -gt 0 ]; do
    case $1 in
        --allow-cpu) allow_cpu=yes ;;
        --out | --measures)
            [ $# -gt 1 ] || usage
            if [ "$1" = --out ]; then out=$2; else measures=$2; fi
            shift
            ;;
        all) parts+=("${every[@]}") ;;
        *) [[ " ${every[*]} " == *" $1 "* ]] && parts+=("$1") || usage ;;
    esac
    shift
done
[ ${#parts[@]} -gt 0 ] || parts=("${every[@]}")
mkdir -p "$out" && out=$(cd "$out" && pwd) && cd "$root" || exit 2

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
cores=$(nproc)
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    shape=llama-8b tiny=() only=(-k cuda) jobs=$((cores < 12 ? cores : 12))
    export TRITON_INTERPRET=0 # else the tests guess by device files whether there is a GPU
elif [ $allow_cpu = yes ]; then
    shape=tiny tiny=(--tiny) only=() jobs=$(((cores + 1) / 2))
else
    echo "torch finds no CUDA device; pass --allow-cpu to check on the CPU" >&2
    exit 2
fi
# What one part compiles the next ones find, as on a machine whose cache was filled by `penstock warm`.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton-cache}

# limited SECONDS COMMAND...: in the background and waited for, so that a signal is taken at once.
running=
limited() {
    timeout -k 10 "$@" &
    running=$!
    wait "$running"
}

# tests PART FOLDER PATH...: several processes at a time, since kernels are compiled one after the other in each. The
# session ends by itself before it is ended, so that failures are told in whole. Fixtures of its own FOLDER alone,
# --confcutdir: those above it need packages that are not here.
tests() {
    local part=$1 folder=$2
    shift 2
    limited 520 "$python" -m pytest "$@" "${only[@]}" --confcutdir "tests/$folder" -n "$jobs" --dist worksteal \
        -p no:cacheprovider -o addopts= -o timeout=240 --session-timeout 480 -v --junitxml "$out/$part.xml"
}

bench() {
    limited 500 "$python" infra/gpu/bench.py "$out/bench.json" --shape $shape "${tiny[@]}" --measures "$measures"
}

peer() {
    limited 200 "$python" infra/gpu/bench.py "$out/short.json" --shape $shape "${tiny[@]}" --measures short &&
        limited 300 "$python" infra/gpu/peer.py "$out/peer.json" --like "$out/short.json"
}

alone() {
    local status=0 name
    for name in gpu_attention kernels sampler; do
        limited 170 "$python" -m "tests.bench.$name" "${tiny[@]}" || status=$?
    done
    return $status
}

kernels() { tests kernels engine tests/engine/kernels tests/engine/execution/device; }
parity() { tests parity parity tests/parity; }
engine() { tests engine engine tests/engine --ignore tests/engine/kernels --ignore tests/engine/execution/device; }

report() {
    "$python" infra/gpu/report.py "$out" "${parts[@]}"
}

# Ended before its time or not, what was found so far is reported.
exec 3>&1 4>&2 # a signal may come while these are a part's log
trap '[ -z "$running" ] || kill "$running" 2>/dev/null; exit 143' TERM INT HUP
trap 'report >&3 2>&4; exit $?' EXIT
for part in "${parts[@]}"; do
    (cd "$out" && rm -f "$part".{status,log,xml,json})
    [ "$part" != peer ] || rm -f "$out/short.json"
    began=$SECONDS
    "$part" >"$out/$part.log" 2>&1
    echo "$? $((SECONDS - began))" >"$out/$part.status"
    running=
    report >/dev/null 2>&1
done
