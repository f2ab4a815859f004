#!/usr/bin/env bash
# Tests and benches the engine on a machine with an NVIDIA GPU, in under 9 minutes.
#
#   infra/gpu/check.sh [--allow-cpu]
#
# Needs Python 3.11+ (PYTHON, default python3) with torch, transformers, tokenizers, safetensors, jinja2, numpy, pytest
# and hypothesis; no network, no other package. Writes report.json and report.txt into OUT (default ./gpu-report).
# Exits 0 if every test passed and every bench ran. --allow-cpu runs the same on a CPU, with a tiny model.
set -uo pipefail

cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
out=${OUT:-./gpu-report}
allow_cpu=no
for argument in "$@"; do
    case $argument in
        --allow-cpu) allow_cpu=yes ;;
        *) echo "usage: infra/gpu/check.sh [--allow-cpu]" >&2; exit 2 ;;
    esac
done

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    device=cuda shape=1b threads=8
elif [ $allow_cpu = yes ]; then
    device=cpu shape=tiny threads=1
else
    echo "torch finds no CUDA device; pass --allow-cpu to check on the CPU" >&2
    exit 2
fi

mkdir -p "$out" || exit 2
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
rm -f "$out"/report.json "$out"/report.txt
began=$SECONDS

# Of its own folder alone, --confcutdir: the other rooms' fixtures need packages that are not here.
run_tests() {
    timeout "$2" "$python" -m pytest "tests/$1" --confcutdir "tests/$1" -p no:cacheprovider -o addopts= -q \
        --junitxml "$work/$1.xml" >"$work/$1.log" 2>&1
    echo $? >"$work/$1.status"
}

run_tests engine 160
run_tests parity 170
{
    timeout 60 "$python" infra/gpu/random_model.py "$work/model" --shape $shape &&
        timeout 130 "$python" -m engine.bench --model "$work/model" --workload W1,W8,W32,W64mix --device $device \
            --dtype bfloat16 --threads $threads --repeats 1 --json "$work/bench.json"
} >"$work/bench.log" 2>&1
echo $? >"$work/bench.status"

"$python" infra/gpu/report.py "$work" "$out" --shape $shape --seconds $((SECONDS - began))
