"""Processor time of a decode step whose rows have LoRA adapters, as a multiple of that without, on native kernels.

    python -m tests.bench.adapters

32 rows of a random model of SmolLM2-135M's shape in bf16, over 1, 8 and 32 adapters of rank 16 of all its linear
modules; one thread. By turns in one process: the least of the rounds' medians.

    python -m tests.bench.adapters --loading

Times between the tokens of one stream, while another thread loads such adapters one after another, and while it does
not, by turns; and the time of a load beside the stream. It needs two cores of its own.
"""

from __future__ import annotations

import statistics
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import torch
from torch import Tensor

from engine.adapters import Adapter, load_adapter
from engine.models import Model, load_model
from tests.engine.adapters.folders import write_adapter
from tests.engine.random_models import write_model
from tests.parity.driver import Driver, greedy, prompts_of

ROWS = 32
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
COUNTS = (0, 1, 8, 32)


def random_adapter(model: Model, folder: Path, rank: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, Tensor] = {}
    for prefix, linear in model.linears():
        for part, outputs in linear.parts.items():
            name = f"base_model.model.{prefix}{part}"
            values[f"{name}.lora_A.weight"] = (torch.randn(rank, linear.inputs, generator=generator) * 0.02).bfloat16()
            values[f"{name}.lora_B.weight"] = (torch.randn(outputs, rank, generator=generator) * 0.02).bfloat16()
    return load_adapter(write_adapter(folder, values), model)


def step_seconds(model: Model, adapters: list[Adapter], steps: int) -> float:
    """The median processor time of a step in which ROWS sequences decode, over these adapters by turns."""
    driver = Driver(model, tokens=16 * ROWS, sequences=ROWS, blocks=8 * ROWS)
    for i in range(ROWS):
        (prompt,) = prompts_of([16], model.vocab_size, seed=i)
        driver.add(str(i), prompt, greedy(steps + 4), adapters[i % len(adapters)] if adapters else None)
    for _ in range(2):
        driver.step()
    seconds = []
    for _ in range(steps):
        began = time.process_time()
        driver.step()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def gaps(model: Model, steps: int) -> list[float]:
    """The times (s) between the tokens of one stream."""
    driver = Driver(model, tokens=256, sequences=1, blocks=64)
    (prompt,) = prompts_of([16], model.vocab_size)
    driver.add("0", prompt, greedy(steps + 4))
    for _ in range(3):
        driver.step()
    times = [time.perf_counter()]
    for _ in range(steps):
        driver.step()
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]


def beside_loads(model: Model, places: list[Path], steps: int, rounds: int) -> None:
    """Print how long a stream's tokens take while adapters are loaded, and while none is."""
    loads: list[float] = []
    going, stopping = Event(), Event()

    def load() -> None:
        for place in cycle(places):
            going.wait()
            if stopping.is_set():
                return
            began = time.perf_counter()
            load_adapter(place, model)
            loads.append(time.perf_counter() - began)

    loader = Thread(target=load)
    loader.start()
    quiet: list[float] = []
    busy: list[float] = []
    gaps(model, 8)
    for _ in range(rounds):
        quiet += gaps(model, steps)
        going.set()
        busy += gaps(model, steps)
        going.clear()
        time.sleep(0.2)
    stopping.set()
    going.set()
    loader.join()
    for name, seconds in (("no load", quiet), ("loads", busy)):
        ordered = sorted(seconds)
        p50, p99, most = (ordered[int(share * (len(ordered) - 1))] * 1e3 for share in (0.5, 0.99, 1))
        print(f"{name:8} {len(ordered)} tokens: median {p50:.2f} ms, p99 {p99:.2f} ms, most {most:.2f} ms")
    print(f"{len(loads)} loads: the first {loads[0] * 1e3:.0f} ms, median {statistics.median(loads) * 1e3:.0f} ms")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loading", action="store_true", help="a stream beside loads, in place of steps with adapters")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        base = write_model(Path(folder) / "base", tokenizer=False, num_hidden_layers=arguments.layers, **SHAPE)
        model = load_model(base, "auto", torch.device("cpu"), "native")
        places = [Path(folder) / str(i) for i in range(max(COUNTS))]
        adapters = [random_adapter(model, place, arguments.rank, i) for i, place in enumerate(places)]
        began = time.process_time()
        load_adapter(places[0], model)
        print(f"an adapter has {adapters[0].nbytes / 1e6:.1f} MB, and loads in {time.process_time() - began:.3f} s")
        if arguments.loading:
            beside_loads(model, places, 16 * arguments.steps, arguments.rounds)
            return
        times: dict[int, list[float]] = {count: [] for count in COUNTS}
        for _ in range(arguments.rounds):
            for count in COUNTS:
                times[count].append(step_seconds(model, adapters[:count], arguments.steps))
    least = {count: min(seconds) for count, seconds in times.items()}
    for count, seconds in least.items():
        print(f"{count:2} adapters: {seconds * 1e3:5.1f} ms a step, {seconds / least[0]:.2f} times that without")


if __name__ == "__main__":
    main()
