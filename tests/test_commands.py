"""Each command that README and the pages name is started: with the arguments that they give it, and as a tiny run.

`penstock ...` is parsed as it is written, and not run. `make TARGET` is made dry. `python -m MODULE ...` takes the
documented arguments; then the module runs with those of TINY, or another test file runs it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.kernels.native import load_library
from tests.bench import figures
from tests.in_process import penstock, start
from tests.processes import ROOT
from workers.library.reference import bundled

MODEL = bundled()["tiny"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Module -> what it is run with. MODEL is a bundled model, OTHER a build of the native kernels.
TINY = {
    "engine.bench": ["--model MODEL --workload W1 --repeats 1 --threads 1 --breakdown"],
    "tests.bench.adapters": ["--layers 1 --steps 1 --rounds 1"],
    "tests.bench.many_adapters": ["--registered 3 --hot 2 --tasks 4 --rounds 1"],
    "tests.bench.attention": ["--against OTHER --layers 1 --rounds 1"],
    "tests.bench.batches": ["--lines 100 --urls /v1/completions"],
    "tests.bench.breaker": ["--seconds 3 --rate 2 --rounds 1"],
    "tests.bench.chat": ["--rounds 1"],
    "tests.bench.checkpoints": ["MODEL MODEL --workload W1 --rounds 1 --threads 1"],
    "tests.bench.cold_start": ["--rounds 1"],
    "tests.bench.compaction": ["--tokens 1000"],
    "tests.bench.compressed_kv": ["--sequences 1 --length 64 --chunk 16 --layers 1 --rounds 1"],
    "tests.bench.watermark": ["--model MODEL --outputs 2 --pieces 5 --tokens 8"],
    "tests.bench.llama_cpp": ["MODEL --requests 1 --tokens 4 --rounds 1 --threads 1"],
    "tests.bench.looks": ["--workers 10 --calls 100"],
    "tests.bench.rolled": ["--rollouts 0"],
    "tests.bench.candidates": ["--candidate nan"],
    "tests.bench.placed": ["--model tiny --rounds 1 --conversations 1 --turns 2"],
    "tests.bench.rollouts": ["--kind crashes --others 1"],
    "tests.bench.routing": ["--tasks 40 --changes 2 --blocks 1"],
    "tests.bench.consoles": ["--consoles 2 --workers 3 --seconds 1", "--ask --consoles 1 --workers 1 --seconds 1"],
    "tests.bench.encoders": ["--texts 4 --turns 1 --longest 16 --threads 1"],
    "tests.bench.failover": [
        *("--kills 1 --workers 2 --streams 2", "--soak 1 --workers 1 --streams 2"),
        "--kills 2 --within 4 --workers 2 --streams 2",
        "--rank --stages 2 --kills 1 --workers 2 --streams 2",
    ],
    "tests.bench.files": ["--lines 1000"],
    "tests.bench.full_store": ["--seconds 1 --streams 2 --tokens 20"],
    "tests.bench.flame": ["STACKS --title Steps --out OUT"],
    "tests.bench.forms": ["MODEL --sequences 1 2 --rounds 1 --threads 1", "--rules --rounds 1"],
    "tests.bench.hostile": ["--attacks nowhere --seconds 1"],
    "tests.bench.keys": ["--tasks 16", "--tasks 16 --limits"],
    "tests.bench.knee": ["--most 4 --repeats 1"],
    "tests.bench.eta": ["--tasks 40 --warm 60"],
    "tests.bench.explain": ["--tasks 500"],
    "tests.bench.observed": ["--rounds 1 --tasks 10"],
    "tests.bench.watching": ["--workers 2 --tasks 1000 --scrapes 2 --seconds 1"],
    "tests.bench.ledger": ["--rounds 1 --batch 3"],
    "tests.bench.overload_by_arithmetic": ["--loads 1 --tasks 20 --output 8"],
    "tests.bench.path": ["--sequences 2 --tokens 400 --step-ms 5"],
    "tests.bench.placement": ["--conversations 3 --workers 2"],
    "tests.bench.plan": ["--sequences 2 --steps 3"],
    "tests.bench.products": ["--rows 1 --rounds 1", "--rows 1 --rounds 1 --against OTHER"],
    "tests.bench.quantised": ["--matrices 1 --outputs 64 --inputs 128 --turns 1"],
    "tests.bench.ranks": ["MODEL --ranks 2 --threads 2 --requests 1"],
    "tests.bench.runs": ["--sequences 2 --layers 1 --rounds 1"],
    "tests.bench.scaling": ["--seconds 12 --capacity-seconds 1 --load 1 --max 2"],
    "tests.bench.sources": ["--lines 1000 --window 500"],
    "tests.bench.speculation": ["--lookup --workload W1 --rounds 1 --output 2"],
    "tests.bench.store": ["--sequences 2 --steps 2"],
    "tests.bench.sharing": ["MODEL --tokens 4 --rounds 1 --encoder-s 0.1 --threads 1"],
    "tests.bench.takeover": ["--rounds 1 --model MODEL"],
    "tests.bench.startup": ["--model MODEL --rounds 1 --cold"],
    "tests.bench.sqs": ["--tasks 20 --task-seconds 0.1 --messages 3 --idle-seconds 1 --wakes 1"],
    "tests.bench.texts": ["--texts 4 --longest 16 --threads 1"],
    "tests.bench.ttft": ["--answers --rounds 2"],
    "tests.bench.webhooks": ["--rate 20 --seconds 1 --receivers 2 --rows 20"],
    "tests.bench.way": ["--rounds 1"],
    "tests.bench.windows": ["--prompt 20 --steps 2"],
    "tests.protocol.model": ["--scenario undone"],
}
#: Module -> the test file that runs it, in small. `test_figures.py` runs those of `figures.REDUCED`.
ELSEWHERE = {
    "tests.bench.figures": "test_figures.py",
    "tests.chaos": "chaos/test_suite.py",
    "tests.chaos.drain": "chaos/test_drain.py",
    "tests.chaos.kill_between_calls": "chaos/test_kill_between_calls.py",
    "tests.engine.kernels.triton.builds": "engine/kernels/triton/test_builds.py",
    "tests.fuzz.on_http": "fuzz/test_on_http.py",
    "tests.fuzz.on_queue": "fuzz/test_on_queue.py",
    "tests.fuzz.soak": "fuzz/test_soak.py",
}
#: A bench may take minutes on a busy machine, to start what it measures.
BENCH = (pytest.mark.exhaustive, pytest.mark.timeout(600))
#: Benches of the native kernels.
NATIVE = {"adapters", "attention", "products", "quantised", "runs", "compressed_kv"}


def snippets() -> Iterator[tuple[str, bool]]:
    """Lines of code blocks, which are whole; and code within sentences, which may leave out what is not spoken of."""
    for page in PAGES:
        text = page.read_text("utf-8").replace("\\\n", "")
        yield from ((line, True) for line in re.findall(r"^    +(\S.*)$", text, re.MULTILINE))
        sentences = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
        yield from ((" ".join(code.split()), False) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", sentences))


def named(pattern: str) -> dict[str, bool]:
    """What follows the pattern in any snippet, without remarks, brackets and the end of a `$(...)`; and whether it is
    whole."""
    found: dict[str, bool] = {}
    for snippet, whole in snippets():
        if one := re.search(rf"(?:^|\s|/)(?:{pattern}) (.*)$", snippet):
            line = re.sub(r"\s+#.*|\s+> \S+$|[\[\]]|\)$", "", one[1])
            found[line] = found.get(line, False) or (whole and " ... " not in line)
    return found


def modules() -> dict[str, list[str]]:
    """Each module of ours that is run by `python -m`, and the arguments that it is given."""
    found: dict[str, list[str]] = {}
    for line in named("python -m"):
        module, _, arguments = line.partition(" ")
        if (ROOT / module.partition(".")[0] / "__init__.py").exists():
            found.setdefault(module, []).append(arguments)
    return found


def of_procfile() -> list[str]:
    lines = [line.partition(": penstock ")[2] for line in (ROOT / "Procfile").read_text("utf-8").splitlines()]
    # ${NAME:+--option $NAME}: said where NAME is set, as here.
    found = [re.sub(r"\$\{\w+:\+([^}]*)\}", r"\1", line) for line in lines]
    found = [line.replace("$WEBHOOK_ALLOW", "10.0.0.0/8") for line in found]
    found = [line.replace("$PROXY_HEADERS", "::1").replace("$AUTH", "keys") for line in found]
    return list(dict.fromkeys(re.sub(r"\$\{[^}]*\}+|\$[A-Z_]+", "1", line) for line in found))


class Parsed(Exception):
    """Arguments were taken; nothing was run."""


@pytest.mark.parametrize(
    ("module", "arguments"), [(module, line) for module, lines in modules().items() for line in lines]
)
def test_documented_arguments_are_taken(module: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(*given: Any) -> None:
        parse(*given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    with pytest.raises(Parsed):
        start(module, *shlex.split(arguments))


@pytest.mark.parametrize("module", sorted(modules().keys() - TINY.keys() - figures.REDUCED.keys()))
def test_a_documented_module_is_run_by_some_test(module: str) -> None:
    assert module in ELSEWHERE, f"the documentation names {module}, and no test runs it: add it to TINY"
    package, _, name = module.rpartition(".")
    text = (ROOT / "tests" / ELSEWHERE[module]).read_text("utf-8")
    assert module in text or f"from {package} import {name}\n" in text


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """What the words in capital letters stand for."""
    library = load_library()
    stacks = tmp_path / "stacks"
    stacks.write_text("Pipeline.step (engine/pipeline.py);work (engine/work.py) 10\n")
    built = "" if library is None else str(ROOT / f"engine/kernels/native/_{library.isa}.so")
    found = {"MODEL": MODEL, "OTHER": built, "STACKS": stacks, "OUT": tmp_path / "out"}
    return {name: str(one) for name, one in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        pytest.param(module, line, marks=BENCH if ".bench" in module else ())
        for module, lines in TINY.items()
        for line in lines
    ],
)
def test_a_tiny_run_ends_well(module: str, arguments: str, places: dict[str, str]) -> None:
    if module.rpartition(".")[2] in NATIVE and load_library() is None:
        pytest.skip("native kernels are not built for this CPU")
    start(module, *(places.get(word, word) for word in arguments.split()))


@pytest.mark.parametrize("target", [line.partition(" ")[0] for line in named("(?<!secrets )make")])
def test_a_target_can_be_made(target: str) -> None:
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("line", list(dict.fromkeys([*named("penstock"), *of_procfile()])))
def test_a_command_and_its_options_are_there(line: str) -> None:
    """Nothing is parsed: what is left out may be what it cannot do without."""
    command = penstock()
    words = shlex.split(line.removeprefix("COMMAND "))
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name = words.pop(0)
        command = command.commands[name if name in command.commands else getattr(command, "default", name)]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= {*known, "--help"}


@pytest.mark.parametrize("line", [line for line, whole in named("penstock").items() if whole] + of_procfile())
def test_a_command_is_taken_as_it_is_written(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed with all its options, and not run. A broker is in the environment, as pages say where they name none."""
    monkeypatch.setenv("BROKER_URL", "sqs://us-east-1")
    command = penstock()
    words = shlex.split(line)
    context = command.make_context("penstock", list(words))
    while hasattr(command, "resolve_command"):  # a group of commands
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
        context = command.make_context(name, words, parent=context)
