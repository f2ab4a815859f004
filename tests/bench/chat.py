"""What a chat request costs the gateway before it is queued: `python -m tests.bench.chat`.

Rendering the bundled model's template in this process and confined in its own; encoding chats of 1,000 to 8,000
characters whole, and only their last turn, which is all that a cache of repeated beginnings could leave to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.text import ChatTemplate, ConfinedTemplate, TemplateSource, Tokenizer
from tests.processes import ROOT

MODEL = ROOT / "workers" / "models" / "tiny"
TURNS = 5


def chat(source: str, size: int, number: int) -> list[dict[str, Any]]:
    """A chat of `size` characters in 5 turns, all but the last the same for every `number`."""
    turn = size // TURNS
    starts = [5000 + k * turn for k in range(TURNS - 1)] + [40_000 + number * 300]
    roles = ["user", "assistant"]
    return [{"role": roles[k % 2], "content": source[at : at + turn]} for k, at in enumerate(starts)]


def median_ms(work: Callable[[int], Any], rounds: int, clock: Callable[[], float]) -> float:
    times = []
    for number in range(rounds):
        begin = clock()
        work(number)
        times.append(1000 * (clock() - begin))
    return round(statistics.median(times), 3)


def measure(rounds: int) -> dict[str, Any]:
    tokenizer, here = Tokenizer.from_folder(MODEL), ChatTemplate.from_folder(MODEL)
    source = TemplateSource.from_bytes({"tokenizer_config.json": (MODEL / "tokenizer_config.json").read_bytes()})
    assert here is not None
    assert source is not None
    there = ConfinedTemplate(source)
    text = Path(argparse.__file__).read_text("utf-8")
    found: dict[str, Any] = {"rounds": rounds}
    try:
        short = chat(text, 1000, 0)
        begin = time.perf_counter()
        there.render(short)
        found["first_render_ms"] = round(1000 * (time.perf_counter() - begin), 1)
        found["render_ms_p50"] = median_ms(lambda _: here.render(short), rounds, time.perf_counter)
        found["render_confined_ms_p50"] = median_ms(lambda _: there.render(short), rounds, time.perf_counter)
    finally:
        there.close()
    for size in (1000, 2000, 4000, 8000):
        whole = [here.render(chat(text, size, number)) for number in range(min(rounds, 150))]
        last = [here.render(chat(text, size, number)[-1:]) for number in range(len(whole))]
        found[f"encode_{size}_ms_p50"] = {
            "whole": median_ms(lambda k, texts=whole: tokenizer.encode(texts[k], False), len(whole), time.thread_time),
            "last turn": median_ms(
                lambda k, texts=last: tokenizer.encode(texts[k], False), len(last), time.thread_time
            ),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    print(json.dumps(measure(parser.parse_args().rounds), indent=1))


if __name__ == "__main__":
    main()
