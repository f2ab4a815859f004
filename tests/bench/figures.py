"""Measures the headline figures again and writes them into the documentation: `make figures`.

    python -m tests.bench.figures [--only engine,http] [--reduced] [--docs DIR] [--minutes 15]

Each figure is what one or more benches print, run one after the other as processes of their own on the first `--cores`
cores. Its table and caption replace what lies between `<!-- figures:NAME -->` and `<!-- /figures -->` in some page. A
figure that this machine cannot measure, or not within the time, keeps its table and its date; the command then fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from engine.kernels import select
from engine.quant.make import Recipe, quantise
from tests.engine.random_models import write_model
from tests.processes import ROOT

#: Hugging Face's SmolLM 135M, as its config.json has it.
LLAMA_135M = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
ENGINE = "engine.bench --model {} --workload W1,W8,W32,W64mix --dtype bfloat16 --threads 2 --json OUT"
#: Module -> arguments with which it only shows that it runs.
REDUCED = {
    "engine.bench": "--workload W1 --repeats 1",
    "tests.bench.publish": "--sequences 2 --steps 3",
    "tests.bench.consume": "--tasks 10",
    "tests.bench.fetch": "--backlog 64 --rounds 1 --tenants 1",
    "tests.bench.ttft": "--rounds 3",
    "tests.bench.readers": "--readers 20 --tokens 2",
    "tests.bench.submits": "--tasks 16",
    "tests.bench.overload": "--loads 1 --seconds 0.3 --alone 2 --rows 2 --output 8",
}
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    commands: tuple[str, ...]
    """Modules with their arguments; DIR and DIR-INT8 are the models that `models` writes, OUT is a JSON file."""
    table: Callable[[list[Record]], list[tuple[str, ...]]]
    """Rows, the heading first, of all JSON objects that the commands gave, in their order."""


def _engine(found: list[Record]) -> list[tuple[str, ...]]:
    heading = ("Llama 135M shape", "bf16, output tokens/s", "of the limit", "INT8, output tokens/s", "of the limit")
    plain, int8 = (one["penstock"]["results"] for one in found)
    rows = [
        (name, *(cell for one in (run, int8[name]) for cell in (_speed(one), f"{one['share_of_limit']:.0%}")))
        for name, run in plain.items()
    ]
    return [heading, *rows]


def _speed(result: Record) -> str:
    return f"**{result['best_output_tokens_per_s']:.1f}**"


def _queue(found: list[Record]) -> list[tuple[str, ...]]:
    publish, consume, *fetches = found
    rows = [
        ("tokens a second that the publisher streams: durable stream and channel", f"{publish['tokens_per_s']:,.0f}"),
        ("one-token tasks a second through one worker, stub engine", f"{consume['tasks_per_s']:,.0f}"),
    ]
    for one in fetches:
        ((batch, took),) = (
            (name.split("_")[1], value) for name, value in one.items() if re.fullmatch(r"fetch_\d+_ms_p50", name)
        )
        rows.append(
            (f"one FETCH of {batch}, {one['backlog']:,} queued by {one['tenants']:,} tenants (p50)", f"{took:.1f} ms")
        )
    return [("queue", "figure"), *rows]


def _http(found: list[Record]) -> list[tuple[str, ...]]:
    (one,) = found
    names = {"engine": "engine called directly", "http": "HTTP, queue and stream", "added": "what these add, in pairs"}
    cells = ((f"{one[f'{name}_ms_{part}']:.1f} ms" for part in ("p50", "p95")) for name in names)
    rows = [(title, *two) for title, two in zip(names.values(), cells, strict=True)]
    return [("time to first token, one task at a time", "p50", "p95"), *rows]


def _gateway(found: list[Record]) -> list[tuple[str, ...]]:
    read, posted = found
    rows = [(f"events to {read['readers']:,} readers", read["events_per_s"], read["events_per_cpu_s"])]
    rows += [
        (title, posted[f"{name}_per_s"], posted[f"{name}_per_cpu_s"])
        for name, title in (
            ("gateway", "tasks over HTTP"),
            ("echo", "the same to a bare FastAPI echo"),
            ("celery", "messages by Celery's `apply_async`"),
        )
    ]
    p50, p99 = (f"{part}: {read[f'latency_ms_{part}']:.0f} ms" for part in ("p50", "p99"))
    return [
        ("one gateway process", "a second", "a processor second"),
        *((title, f"{by_clock:,.0f}", f"{by_cpu:,.0f}") for title, by_clock, by_cpu in rows),
        (f"from publishing to reading, at {read['share']:.0%} of the most events", p50, p99),
        ("with these readers", f"{read['rss_mb']:.0f} MB", f"{read['connections']} connections to the store"),
    ]


def _overload(found: list[Record]) -> list[tuple[str, ...]]:
    capacity, alone, *loads, ratios = found
    heading = ("load", "tokens/s in time", "priority: time to first token, p50 and p95")
    rows = [("priority tasks, one after the other", "", _ttft(alone))]
    rows += [(f"{one['load']:g} times the capacity", f"{one['good_tokens_per_s']:,.0f}", _ttft(one)) for one in loads]
    last = (
        "the last against the best, and against alone",
        f"**{ratios['goodput']}**",
        f"**{ratios['priority_ttft']}**",
    )
    return [heading, *rows, (f"capacity {capacity['capacity_tokens_per_s']:,.0f} tokens/s; " + last[0], *last[1:])]


def _ttft(one: Record) -> str:
    return f"{one['priority_ttft_ms_p50']:.1f}, {one['priority_ttft_ms_p95']:.1f} ms"


#: The longest last: it is what is left out where time is short.
FIGURES = {
    "queue": Figure(
        ("tests.bench.publish --steps 1000", "tests.bench.consume --tasks 10000", "tests.bench.fetch"), _queue
    ),
    "http": Figure(("tests.bench.ttft --rounds 60",), _http),
    "gateway": Figure(("tests.bench.readers", "tests.bench.submits"), _gateway),
    "engine": Figure((ENGINE.format("DIR"), ENGINE.format("DIR-INT8")), _engine),
    "overload": Figure(("tests.bench.overload --seconds 20 --loads 1 3",), _overload),
}


def models(folder: Path) -> dict[str, str]:
    """A Llama of 135M's shape with random weights in bf16, and the same in 8 bits, its head too."""
    plain, int8 = write_model(folder / "bf16", tokenizer=False, spread=0.02, **LLAMA_135M), folder / "int8"
    int8.mkdir()
    quantise(plain, int8, Recipe(8, "nearest", None, 8), [list(range(256))], torch.device("cpu"), lambda _: None)
    return {"DIR": str(plain), "DIR-INT8": str(int8)}


def ran(command: str, places: Mapping[str, str], seconds: float) -> list[Record]:
    """The JSON objects that it prints, each on a line of its own, or that it writes to OUT.

    Raises subprocess.SubprocessError where it fails or takes longer; what it started ends with it.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        module, *arguments = ((places | {"OUT": str(out)}).get(word, word) for word in shlex.split(command))
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=max(1.0, seconds))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, process.args)
        return records(printed) + records(out.read_text().replace("\n", "") if out.exists() else "")


def records(printed: str) -> list[Record]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def machine(cores: int) -> str:
    """The processor, how much of it is used, and for which instructions the kernels are that it computes with."""
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    kernels = select(torch.device("cpu"), torch.bfloat16).name
    return f"{model[1] if model else 'unknown processor'}, {cores} of {os.cpu_count()} cores, kernels `{kernels}`"


def shown(commands: tuple[str, ...], where: str, rows: list[tuple[str, ...]]) -> str:
    """The caption and the table in Markdown."""
    heading, *rest = rows
    lines = [f"    .venv/bin/python -m {command}" for command in commands]
    lines += ["", f"{date.today()}; {where}.", ""]
    lines += ["| " + " | ".join(row) + " |" for row in (heading, ("---",) * len(heading), *rest)]
    return "\n".join(lines)


def place_of(docs: Path, name: str) -> tuple[Path, re.Match[str]]:
    """The page with the region of this name, and what lies within it. Raises LookupError."""
    pattern = re.compile(rf"(?<=<!-- figures:{name} -->\n)\n?.*?(?=<!-- /figures -->)", re.DOTALL)
    for page in sorted(docs.rglob("*.md")):
        if found := pattern.search(page.read_text("utf-8")):
            return page, found
    raise LookupError(f"no page in {docs} has a region <!-- figures:{name} --> ... <!-- /figures -->")


def write(docs: Path, name: str, text: str) -> None:
    page, found = place_of(docs, name)
    whole = page.read_text("utf-8")
    page.write_text(f"{whole[: found.start()]}\n{text}\n\n{whole[found.end() :]}", "utf-8")


def measure(name: str, args: argparse.Namespace, where: str, places: Mapping[str, str], until: float) -> None:
    figure = FIGURES[name]
    commands = tuple(f"{one} {REDUCED[one.partition(' ')[0]]}" if args.reduced else one for one in figure.commands)
    found = [record for one in commands for record in ran(one, places, until - time.monotonic())]
    write(args.docs, name, shown(commands, where, figure.table(found)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FIGURES), help="by commas, of %(default)s")
    parser.add_argument("--reduced", action="store_true", help="show that it works; the figures say nothing then")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=15.0, help="in all, at most")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    names = args.only.split(",")
    for name in names:  # told before anything is measured
        place_of(args.docs, name)
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    where = f"{machine(len(cores))}; load {os.getloadavg()[0]:.1f} before"
    kept = 0
    with tempfile.TemporaryDirectory() as folder:
        places = models(Path(folder)) if "engine" in names else {}
        for name in names:
            began = time.monotonic()
            try:
                measure(name, args, where, places, until)
                print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
            except subprocess.SubprocessError as error:
                kept += 1
                print(f"{name} keeps its figures: {error}", file=sys.stderr, flush=True)
    return min(kept, 1)


if __name__ == "__main__":
    sys.exit(main())
