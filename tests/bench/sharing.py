"""How long a decoder's tokens wait beside an embedder on the same cores: `python -m tests.bench.sharing MODEL`.

    this process        the decoder: W8, eight requests of 128 prompt and `--tokens` output tokens at a time
    another             the encoder: texts of 8 to 256 tokens, some steps' worth always in hand while it is to load

By turns, `--rounds` times: the decoder alone, the decoder beside the full load of the encoder, the encoder alone. It
prints the gaps between a request's tokens (ms), beside and alone, with their ratios; the tokens per second of both; and
the processor time of the decoder's step. `--encoder` is a folder; without it, the encoder has MiniLM's shape and random
weights. `--free` also runs them without turns, each with all threads, as two workers that know nothing of each other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any, Final

from engine import Engine, EngineConfig, Event, PoolingEngine, Request, SamplingParams
from engine.request import Pooling
from tests.bench import sharing
from tests.engine.random_encoders import write_encoder

SEQUENCES: Final = 8
PROMPT: Final = 128
#: Requests of the encoder in hand, and the texts of each: some steps.
IN_HAND: Final = 8
TEXTS: Final = 16
LENGTHS: Final = (8, 256)
#: all-MiniLM-L6-v2's.
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 30522,
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
}


@dataclass
class Gaps:
    """Times between a request's tokens (s)."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    took_s: float = 0.0

    def add(self, other: Gaps) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.took_s += other.took_s

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        percentiles = {f"p{p}": ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 95, 99)}
        times = {"mean": statistics.mean(ordered), **percentiles, "max": ordered[-1]}
        return {**{name: round(1e3 * value, 2) for name, value in times.items()}, "tokens_s": self.rate()}

    def rate(self) -> float:
        return round(self.tokens / self.took_s, 1)


def decode(engine: Engine, tokens: int, seed: int) -> Gaps:
    """The gaps of SEQUENCES requests at once."""
    draw, gaps, left = random.Random(seed), Gaps(), [SEQUENCES]
    last: dict[str, float] = {}
    over = threading.Event()

    def take(event: Event) -> None:
        now = time.monotonic()
        if event.token_ids:
            if event.request_id in last:
                gaps.seconds.append(now - last[event.request_id])
            last[event.request_id] = now
            gaps.tokens += len(event.token_ids)
        if event.done:
            left[0] -= 1
            if not left[0]:
                over.set()

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began = time.monotonic()
    for number in range(SEQUENCES):
        ids = [draw.randrange(10, 300) for _ in range(PROMPT)]
        engine.submit(Request(f"{seed}-{number}", ids, params), take)
    over.wait()
    gaps.took_s = time.monotonic() - began
    return gaps


def encode(model: Path, settings: dict[str, Any], ready: Flag, load: Flag, end: Flag, done: Any, idle: Flag) -> None:
    """A process that embeds texts while `load` is set. `done`: the tokens of its texts so far. `idle`: it has none."""
    draw = random.Random(0)
    with PoolingEngine.load(model, EngineConfig(**settings)) as engine:
        room = threading.Semaphore(IN_HAND)

        def take(event: Event) -> None:
            with done.get_lock():
                done.value += event.prompt_tokens
            room.release()

        ready.set()
        for number in range(1 << 60):
            if not load.is_set():
                for _ in range(IN_HAND):
                    room.acquire()
                idle.set()
                room.release(IN_HAND)
            while not load.wait(0.01):
                if end.is_set():
                    return
            lengths = tuple(draw.randint(*LENGTHS) for _ in range(TEXTS))
            ids = [draw.randrange(1000, 2000) for _ in range(sum(lengths))]
            room.acquire()
            engine.submit(Request(str(number), ids, pooling=Pooling(engine.kind, lengths)), take)


def measure(arguments: argparse.Namespace, *, in_turns: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    ready, load, end, idle = (context.Event() for _ in range(4))
    done = context.Value("q", 0)
    common: dict[str, Any] = {"device": "cpu", "threads": arguments.threads}
    with tempfile.TemporaryDirectory(prefix="penstock-turns-") as folder:
        turns, encoder = folder if in_turns else None, arguments.encoder
        if encoder is None:
            encoder = Path(folder) / "encoder"
            write_encoder(encoder, "bert", **SHAPE)
        theirs = common | {"turns": turns, "share": arguments.shares[1], "dtype": arguments.encoder_dtype}
        if arguments.step_tokens is not None:
            theirs["max_num_batched_tokens"] = arguments.step_tokens
        process = context.Process(
            target=sharing.encode, args=(encoder, theirs, ready, load, end, done, idle), daemon=True
        )
        process.start()
        ours = common | {"turns": turns, "share": arguments.shares[0], "kv_cache_bytes": 1 << 28}
        with Engine.load(arguments.model, EngineConfig(**ours)) as engine:
            while not ready.wait(1):
                if not process.is_alive():
                    raise SystemExit("the encoder could not be loaded")
            decode(engine, 16, -1)
            alone, beside, texts_beside, texts_alone = Gaps(), Gaps(), 0, 0
            busy_s = alone_s = cpu_s = 0.0
            steps = 0
            for number in range(arguments.rounds):
                cpu, before = time.process_time(), engine.stats().steps
                alone.add(decode(engine, arguments.tokens, 3 * number))
                cpu_s, steps = cpu_s + time.process_time() - cpu, steps + engine.stats().steps - before
                load.set()
                began, count = time.monotonic(), done.value
                while done.value == count:  # its first batch is over
                    time.sleep(0.01)
                began, count = time.monotonic(), done.value
                beside.add(decode(engine, arguments.tokens, 3 * number + 1))
                texts_beside, busy_s = texts_beside + done.value - count, busy_s + time.monotonic() - began
                began, count = time.monotonic(), done.value
                time.sleep(arguments.encoder_s)
                while done.value == count:
                    time.sleep(0.01)
                texts_alone, alone_s = texts_alone + done.value - count, alone_s + time.monotonic() - began
                idle.clear()
                load.clear()
                idle.wait()
        end.set()
        process.join()
    gaps = {"alone": alone.summary(), "beside": beside.summary()}
    return {
        "in_turns": in_turns,
        "shares": arguments.shares,
        "decoder_ms": gaps,
        "ratio": {name: round(gaps["beside"][name] / gaps["alone"][name], 3) for name in gaps["alone"]},
        "decoder_step_cpu_ms": round(1e3 * cpu_s / steps, 2),
        "encoder_tokens_s": {"alone": round(texts_alone / alone_s), "beside": round(texts_beside / busy_s)},
        "encoder_ratio": round(texts_beside / busy_s / (texts_alone / alone_s), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="the decoder's folder or GGUF file")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--shares", type=float, nargs=2, default=(0.7, 0.3))
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--encoder-s", type=float, default=3.0, help="seconds for which the encoder is alone")
    parser.add_argument("--encoder-dtype", default="auto")
    parser.add_argument("--step-tokens", type=int, help="most tokens of the encoder's step")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--free", action="store_true", help="also without turns")
    arguments = parser.parse_args()
    for in_turns in (True, False) if arguments.free else (True,):
        print(json.dumps(measure(arguments, in_turns=in_turns)), flush=True)


if __name__ == "__main__":
    main()
