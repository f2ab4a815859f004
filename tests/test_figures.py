"""`make figures` runs the benches, and writes what they give between the marks and nowhere else."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import figures
from tests.exhaustive import few
from tests.in_process import start, unchanged
from tests.processes import ROOT

DOCS = ROOT / "docs"
#: A row that each table has.
ROWS = {
    "queue": r"one-token tasks a second .* \| [\d,]+",
    "http": r"HTTP, queue and stream \| [\d.]+ ms \| [\d.]+ ms",
    "gateway": r"tasks over HTTP \| [\d,]+ \| [\d,]+",
    "engine": r"W1 \| \*\*[\d.]+\*\* \| \d+% \| \*\*[\d.]+\*\* \| \d+%",
    "overload": r"priority tasks, one after the other \| *\| [\d.]+, [\d.]+ ms",
}


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Each figure's region, between two sentences."""
    made = tmp_path / "page.md"
    made.write_text(
        "".join(
            f"Before.\n<!-- figures:{name} -->\nOLD FIGURES\n<!-- /figures -->\nAfter.\n" for name in figures.FIGURES
        )
    )
    return made


@pytest.mark.parametrize("name", figures.FIGURES)
def test_each_figure_has_its_place_in_the_documentation(name: str) -> None:
    figures.place_of(DOCS, name)


def test_no_place_waits_for_a_figure_that_nothing_measures() -> None:
    text = "".join(page.read_text("utf-8") for page in DOCS.rglob("*.md"))
    marked = re.findall(r"^<!-- figures:(\w+) -->$", text, re.MULTILINE)
    assert sorted(marked) == sorted(figures.FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("name", few(figures.FIGURES, "queue"))
def test_benches_fill_a_table(
    name: str, page: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any, tmp_path: Path
) -> None:
    """The benches run in this process, and on a small model."""
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 512}
    monkeypatch.setattr(figures, "LLAMA_135M", figures.LLAMA_135M | small)
    out = tmp_path / "out.json"

    def here(command: str, places: dict[str, str], seconds: float) -> list[figures.Record]:
        start(*((places | {"OUT": str(out)}).get(word, word) for word in command.split()))
        printed = capfd.readouterr().out
        return figures.records(out.read_text().replace("\n", "") if out.exists() else printed)

    monkeypatch.setattr(figures, "ran", here)
    monkeypatch.setattr(sys, "argv", ["figures", "--only", name, "--reduced", "--docs", str(page.parent)])
    with unchanged():
        assert figures.main() == 0
    _, found = figures.place_of(page.parent, name)
    assert page.read_text().count("OLD FIGURES") == len(figures.FIGURES) - 1
    assert all(f"    .venv/bin/python -m {command} " in found[0] for command in figures.FIGURES[name].commands)
    assert any(re.fullmatch(ROWS[name], line.strip("| ")) for line in found[0].splitlines()), found[0]


def test_a_process_gives_what_it_prints_and_what_it_writes() -> None:
    (one,) = figures.ran(f"tests.bench.fetch {figures.REDUCED['tests.bench.fetch']}", {}, 60)
    assert one["backlog"] == 64


def test_what_fails_or_takes_too_long_keeps_its_figures(page: Path, capsys: Any) -> None:
    before = page.read_text()
    with pytest.raises(SystemExit):
        start("tests.bench.figures", "--only", "http", "--docs", str(page.parent), "--minutes", "0")
    assert page.read_text() == before
    assert "http keeps its figures" in capsys.readouterr().err
