"""The demo's load and summary, without a system."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from producers.admin.fleet import Fleet, Pool
from producers.contract import keys
from workers.cli.client import Gateway
from workers.cli.demo import Board, KvUse, Lines, Load, Task, report
from workers.trials.bench.figures import percentile


def console(terminal: bool = False) -> tuple[Console, Callable[[], str]]:
    out = io.StringIO()
    made = Console(file=out, force_terminal=terminal, width=80, height=8, color_system=None)
    return made, out.getvalue


def task(number: int, **seen: object) -> Task:
    made = Task(number, "flex", {})
    for name, value in seen.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 24, 100])
def test_a_load_has_all_tiers_as_evenly_as_can_be_the_least_urgent_first(count: int) -> None:
    load = Load(Gateway("http://localhost"), "tiny", count, Console())
    tiers = [one.fields["tier"] for one in load.tasks]
    ranks = [keys.TIERS[tier][0] for tier in tiers]
    assert len(tiers) == count
    assert ranks == sorted(ranks, reverse=True)
    counts = [tiers.count(tier) for tier in keys.TIERS]
    assert max(counts) - min(counts) <= 1


def test_lines_are_shown_once_each_as_they_become_whole() -> None:
    out, text = console()
    lines, one = Lines(out), task(3)
    shown = []
    for piece in ["a", "b\n", "\n  c\nd", "e"]:
        one.texts.append(piece)
        lines.show(one)
        shown.append(text())
    one.status, one.tokens = "completed", 4
    lines.show(one)
    assert shown[0] == ""
    assert shown[1] == "[#03 flex    ] ab\n"
    assert text() == "".join(f"[#03 flex    ] {line}\n" for line in ("ab", "  c", "de", "-- completed, 4 tokens"))


def test_a_board_shows_what_runs_where_there_is_not_room_for_all() -> None:
    out, text = console(terminal=True)
    tasks = [task(number, status="completed") for number in range(20)]
    tasks[13].status, tasks[13].texts = "in_progress", ["\x1b[31mred"]
    with Board(tasks, out):
        pass
    assert "in_progress" in text()
    assert "\u241b[31mred" in text()
    assert len(text().splitlines()) < 20


@given(st.lists(st.floats(0, 1e6), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
def test_a_percentile_is_the_least_value_that_covers_its_share(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values)


def test_the_summary_is_that_of_the_results() -> None:
    out, text = console()
    usage = {"prompt_tokens": 70, "cached_tokens": 64, "output_tokens": 50}
    tasks = [task(number) for number in range(4)]
    for number, one in enumerate(tasks):
        one.result = {
            "tier": "flex",
            "usage": usage,
            "created_at": 100.0,
            "first_token_at": 100.0 + 0.1 * (number + 1),
            "finished_at": 102.0 + number,
        }
    kv = KvUse()
    for used in (3, 9, 5):
        worker = {"kv_blocks_most": used, "kv_blocks_total": 64, "generated_tokens": 100 + used}
        assert kv.note(Fleet([Pool("p", "tiny", workers=[worker, worker])])) == 200 + 2 * used
    report(out, tasks, kv)
    row = next(line for line in text().splitlines() if "flex" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["flex", "4", "200", "200 ms", "400 ms"]
    said = " ".join(text().split())
    assert "4 tasks, 200 tokens in 5.00 s: 40 tokens/s" in said
    assert "KV cache: at most 9 of 64 blocks in use; 256 of 280 prompt tokens came from the prefix cache" in said
