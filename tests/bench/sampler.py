"""Measures the time to choose the tokens of a step: `python -m tests.bench.sampler` (infra/gpu/check.sh runs it).

Steps of 1, 64 and 256 sequences that all ask for the same, over logits of random normal numbers. On a GPU: the device's
time for a launch of the kernels, replayed from a CUDA graph, and the host's for admitting, launching and fetching a
step; `--plain` takes what there is without Triton, which sorts. Without a GPU: the CPU's sampler, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.execution.device.plain_sampling import choose_plainly
from engine.execution.device.sampler import DeviceSampler, chooser
from engine.output import OutputState
from engine.params import SamplingParams
from engine.request import Request
from engine.sampling import SamplingRows, sample
from engine.sequence import Sequence

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.95},
    "top-k, top-p": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "typical": {"temperature": 1.0, "typical_p": 0.9},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "penalties, top-k, top-p": {"temperature": 0.7, "repetition_penalty": 1.1, "top_k": 50, "top_p": 0.95},
}
#: Tokens of each sequence when it is admitted.
PROMPT = 1024


def sequences(rows: int, vocab: int, params: dict[str, Any]) -> list[Sequence]:
    found = []
    for slot in range(rows):
        chosen = SamplingParams(seed=slot, **params)
        tokens = [(7919 * place + slot) % vocab for place in range(PROMPT)]
        output = OutputState(chosen, (), None, 1 << 20)
        request = Request(str(slot), tokens, chosen)
        found.append(Sequence(request, 0, list(tokens), PROMPT, output, slot, slot, 0.0, slot=slot))
    return found


def microseconds(work: Callable[[], object], rounds: int, wait: Callable[[], object]) -> float:
    """Median of five times `rounds` one after the other."""
    work()
    found = []
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        for _ in range(rounds):
            work()
        wait()
        found.append(1e6 * (time.perf_counter() - begin) / rounds)
    return round(statistics.median(found), 1)


def on_a_gpu(logits: torch.Tensor, present: list[Sequence], plain: bool, rounds: int) -> dict[str, float]:
    rows, vocab = logits.shape
    choose = choose_plainly if plain else chooser(rows, vocab, logits.device)
    sampler = DeviceSampler(rows, vocab, logits.device, choose)
    slots = torch.arange(rows, dtype=torch.int32, device=logits.device)
    positions = torch.full((rows,), PROMPT - 1, device=logits.device)
    features = sampler.admit(present)

    def launch() -> None:
        sampler.launch(logits, slots, positions, features)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def step() -> None:
        sampler.admit(present)
        launch()
        sampler.fetch(logits, present)
        for one in present:
            one.tokens.append(0)

    return {
        "device_us": microseconds(graph.replay, rounds, torch.cuda.synchronize),
        "host_us": microseconds(step, rounds, lambda: None),
    }


def on_a_cpu(logits: torch.Tensor, present: list[Sequence], rounds: int) -> dict[str, float]:
    rows, vocab = logits.shape
    sampling = SamplingRows(rows, vocab, logits.device)
    for one in present:
        sampling.admit(one)

    def step() -> None:
        # Edits are made in place.
        sample(logits.clone(), sampling.gather(present))

    return {"us": microseconds(step, rounds, lambda: None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--rounds", type=int, help="steps of each of five measurements (default: 100, on a CPU 1)")
    parser.add_argument("--plain", action="store_true", help="on a GPU, without the kernels")
    parser.add_argument("--tiny", action="store_true", help="2 rows of 512 tokens once: to see that it works")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    if args.tiny:
        args.rows, args.vocab, args.rounds = [2], 512, 1
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    for rows in args.rows:
        generator = torch.Generator().manual_seed(rows)
        logits = (torch.randn(rows, args.vocab, generator=generator) * args.spread).to(device, dtype)
        for name in args.cases:
            present = sequences(rows, args.vocab, CASES[name])
            with torch.inference_mode():
                if gpu:
                    found = on_a_gpu(logits, present, args.plain, args.rounds or 100)
                else:
                    found = on_a_cpu(logits, present, args.rounds or 1)
            about = {"rows": rows, "vocab": args.vocab, "case": name, "device": device.type}
            print(json.dumps(about | found), flush=True)


if __name__ == "__main__":
    main()
