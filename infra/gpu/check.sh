#!/usr/bin/env bash
# Tests and benches the engine on a machine with an NVIDIA GPU, in parts that each take less than 9 minutes.
#
#   infra/gpu/check.sh [kernels] [engine] [parity] [bench] [peer] [all] [--allow-cpu]
#
#   kernels  every kernel against kernels/reference, the device's runner; attention and sampling measured alone
#   engine   the rest of the engine's tests
#   parity   transformers' output in fp32 and bf16, on the GPU
#   bench    the shape of Llama 3.1 8B, bf16, random weights: steps, prefill, offline, and where the time goes
#   peer     transformers' continuous batching beside it, on the same requests
#   all      all of them, one after the other (the default)
#
# Needs Python 3.11+ (PYTHON, default python3) with torch, transformers, tokenizers, safetensors, jinja2, numpy, pytest
# and hypothesis; no network, no other package. MEASURES chooses those of bench (infra/gpu/bench.py lists them). Each
# part leaves what it found in OUT (default ./gpu-report), also when it is ended before its time; report.json, report.txt
# and report.md there hold all parts that were ever run. Exits 0 if every test of the parts that were asked for passed
# and every figure was taken. --allow-cpu does the same on a CPU, with a tiny model.
set -uo pipefail

cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
out=${OUT:-./gpu-report}
allow_cpu=no
parts=() only=()
for argument in "$@"; do
    case $argument in
        --allow-cpu) allow_cpu=yes ;;
        kernels | engine | parity | bench | peer) parts+=("$argument") ;;
        all) parts+=(kernels engine parity bench peer) ;;
        *) echo "usage: infra/gpu/check.sh [kernels|engine|parity|bench|peer|all]... [--allow-cpu]" >&2; exit 2 ;;
    esac
done
[ ${#parts[@]} -gt 0 ] || parts=(kernels engine parity bench peer)

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    shape=llama-8b tiny=() jobs=8
    export TRITON_INTERPRET=0 # else the tests guess by device files whether there is a GPU
elif [ $allow_cpu = yes ]; then
    shape=tiny tiny=(--tiny) jobs=$((($(nproc) + 1) / 2))
else
    echo "torch finds no CUDA device; pass --allow-cpu to check on the CPU" >&2
    exit 2
fi
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd) || exit 2
# What one part compiles the next ones find, as on a machine whose cache was filled by `penstock warm`.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/triton-cache}

# finish NAME STATUS: its exit status and seconds, once it has come to its end.
finish() {
    echo "$2 $((SECONDS - began))" >"$out/$1.status"
}

# Process ids of what runs, to be ended with us.
running=()

# limited SECONDS COMMAND...: in the background and waited for, so that a signal is taken at once.
limited() {
    timeout -k 10 "$@" &
    running=($!)
    wait "${running[0]}"
}

# run_tests PART SECONDS FOLDER FILE...: several processes at a time, since kernels are compiled one after the other in
# each. Of its own folder alone, --confcutdir: the other rooms' fixtures need packages that are not here.
run_tests() {
    local part=$1 limit=$2 folder=$3 status=0 one k
    shift 3
    mkdir -p "$out/$part"
    running=()
    for ((k = 1; k <= jobs && k <= $#; k++)); do
        local files=()
        for ((one = k; one <= $#; one += jobs)); do files+=("${!one}"); done
        timeout -k 10 "$limit" "$python" -m pytest "${files[@]}" "${only[@]}" --confcutdir "tests/$folder" \
            -p no:cacheprovider -o addopts= -v --junitxml "$out/$part/$k.xml" >"$out/$part/$k.log" 2>&1 &
        running+=($!)
    done
    for k in "${running[@]}"; do
        wait "$k"
        one=$?
        [ $one -eq 0 ] || [ $one -eq 5 ] || status=$one # 5: nothing of these is for this device
    done
    return $status
}

kernels() {
    local status=0
    run_tests kernels 400 engine $(find tests/engine/kernels tests/engine/device -name 'test_*.py' | sort) || status=$?
    [ $shape = tiny ] || for alone in attention sampler; do
        limited 60 "$python" -m "tests.bench.$alone" >"$out/$alone.log" 2>&1 || status=$?
    done
    return $status
}

engine() {
    run_tests engine 480 engine $(find tests/engine -name 'test_*.py' -not -path '*/kernels/*' -not -path '*/device/*' | sort)
}

parity() {
    # On a GPU only what runs there: the CPU's rows are any machine's to check.
    [ $shape = tiny ] || local only=(-k cuda)
    run_tests parity 480 parity $(find tests/parity -name 'test_*.py' | sort)
}

bench() {
    limited 500 "$python" infra/gpu/bench.py "$out/bench.json" --shape $shape "${tiny[@]}" \
        --measures "${MEASURES:-decode:1,decode:16,decode:64,decode:256,prefill,profile,offline,host}" >"$out/bench.log" 2>&1
}

peer() {
    limited 200 "$python" infra/gpu/bench.py "$out/short.json" --shape $shape "${tiny[@]}" --measures short \
        >"$out/peer.log" 2>&1 || return
    limited 300 "$python" infra/gpu/peer.py "$out/peer.json" --shape $shape "${tiny[@]}" >>"$out/peer.log" 2>&1
}

# Ended before its time or not, what was found so far is reported.
trap '[ ${#running[@]} -eq 0 ] || kill "${running[@]}" 2>/dev/null; exit 143' TERM INT
exec 3>&1 4>&2 # a signal may come while these are a part's log
trap '"$python" infra/gpu/report.py "$out" "${parts[@]}" >&3 2>&4; exit $?' EXIT
declare -A made=([kernels]="kernels attention.log sampler.log" [engine]=engine [parity]=parity
    [bench]="bench.json bench.log" [peer]="short.json peer.json peer.log")
for part in "${parts[@]}"; do
    began=$SECONDS
    (cd "$out" && rm -rf "$part.status" ${made[$part]})
    "$part"
    finish "$part" $?
done
