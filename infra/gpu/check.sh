#!/usr/bin/env bash
# Tests and measures the engine on a machine with an NVIDIA GPU, in parts that each take less than 9 minutes.
#
#   infra/gpu/check.sh [PART]... [--out DIR] [--measures LIST] [--allow-cpu]
#
#   bench    measures the shape of Llama 3.1 8B, bf16, random weights: steps, prefill, offline, and a step's parts
#   peer     measures transformers' continuous batching and the engine on the same 16 requests
#   alone    measures attention, the other kernels, and sampling, each alone
#   kernels  tests every kernel against kernels/reference, and the device's runner
#   parity   tests against transformers' output in fp32 and bf16
#   engine   runs the rest of the engine's tests
#   ranks    tests and measures models that several GPUs compute together, as many as there are; a single one is shared
#   all      all parts in this order, figures first (the default)
#
# Only tests that need the GPU run (`pytest -k cuda`). The script needs Python 3.11+ (PYTHON, default python3) with
# torch, triton, transformers, tokenizers, safetensors, jinja2, numpy, pytest, pytest-xdist, pytest-timeout and
# hypothesis, but no network and no other package. --measures chooses the measures of bench (infra/gpu/bench.py lists
# them). The results of each part, and the kernels that Triton compiles, go to --out (default: gpu-report in the
# repository). report.json, report.txt and report.md there cover all parts that were ever run. They are written after
# each part, even if it was interrupted. The script exits 0 if every test of the requested parts passed and every figure
# was taken. --allow-cpu runs everything on a CPU, with a tiny model and with all tests.
set -uo pipefail

every=(bench peer alone kernels parity engine ranks)
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
    export TRITON_INTERPRET=0 # without it, the tests guess from device files whether there is a GPU
elif [ $allow_cpu = yes ]; then
    shape=tiny tiny=(--tiny) only=() jobs=$(((cores + 1) / 2))
else
    echo "torch finds no CUDA device; pass --allow-cpu to check on the CPU" >&2
    exit 2
fi
# Parts share one cache of compiled kernels, as on a machine whose cache was filled by `penstock warm`.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton-cache}

# limited SECONDS COMMAND...: runs a command in the background and waits, so that signals are handled at once.
running=
limited() {
    timeout -k 10 "$@" &
    running=$!
    wait "$running"
}

# tests PART FOLDER PATH...: runs tests in several processes, because each compiles kernels one after another. The
# session times out before `limited` would kill it, so that failures are reported in full. --confcutdir loads only the
# fixtures of FOLDER, because those above it need packages that are not installed.
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
    local few=offline:16:1000:100
    limited 200 "$python" infra/gpu/bench.py "$out/short.json" --shape $shape "${tiny[@]}" --measures $few &&
        limited 300 "$python" infra/gpu/peer.py "$out/peer.json" --like "$out/short.json"
}

# Runs tests/bench/gpu_attention.py, tests/bench/kernels.py and tests/bench/sampler.py.
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

# The ranks' messages pass through the native library, which is built where it is missing: with a C++ compiler. Each
# process of a test has a GPU, so that tests run one after another. Without a GPU those of processes on the CPU run.
ranks() {
    local chosen=("${only[@]}")
    [ ${#only[@]} -gt 0 ] || chosen=(-k "cpu and not interpreted")
    "$python" -c 'import sys; from engine.kernels.native import load_library; sys.exit(load_library() is None)' ||
        limited 60 "$python" setup.py -q build_ext --inplace || return
    local status=0
    limited 270 "$python" -m pytest tests/engine/execution/ranks/test_device.py "${chosen[@]}" \
        --confcutdir tests/engine -p no:cacheprovider -o addopts= -o timeout=200 --session-timeout 260 -v || status=$?
    limited 230 "$python" infra/gpu/ranks.py "$out/ranks.json" "${tiny[@]}" || status=$?
    return $status
}

report() {
    "$python" infra/gpu/report.py "$out" "${parts[@]}"
}

# Report the results so far, even if the script is interrupted.
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
