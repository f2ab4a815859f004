"""As many threads as there are cores for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.execution import threads
from engine.execution.threads import on_nodes_of, threads_for, threads_of_each


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The process's own group is /pods/one."""
    own = tmp_path / "own"
    own.write_text("1:name=systemd:/elsewhere\n0::/pods/one\n")
    root = tmp_path / "cgroup"
    (root / "pods" / "one").mkdir(parents=True)
    found = threads._limit
    monkeypatch.setattr(threads, "_limit", lambda: found(own, root))
    # Above the root there is nothing of ours.
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    return root


@pytest.mark.parametrize(("asked", "said"), [(2, []), (5, ["5 threads were asked for, and there is"])])
def test_what_is_asked_for_is_taken(
    groups: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: int, said: list[str]
) -> None:
    (groups / "pods" / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    assert threads_for(asked, 8) == asked
    assert [" ".join(line.getMessage().split()[:8]) for line in caplog.records] == said


def test_without_a_limit_there_are_as_many_as_torch_has(groups: Path) -> None:
    assert threads_for(None, 8) == 8
    (groups / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    assert threads_for(None, 8) == 8


@pytest.mark.parametrize(("quota", "count"), [(350_000, 3), (50_000, 1), (1_600_000, 8)])
def test_a_limit_of_time_is_one_of_threads(groups: Path, quota: int, count: int) -> None:
    (groups / "pods" / "one" / "cpu.max").write_text(f"{quota} 100000\n")
    assert threads_for(None, 8) == count


@pytest.mark.parametrize(("quota", "each"), [("max", 3), ("400000", 2), ("100000", 1)])
def test_several_processes_share_the_cores_that_one_may_use(
    groups: Path, monkeypatch: pytest.MonkeyPatch, quota: str, each: int
) -> None:
    (groups / "pods" / "one" / "cpu.max").write_text(f"{quota} 100000\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)))
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert threads_of_each(2) == each
    assert threads_of_each(100) == 1


def test_the_strictest_of_all_groups_around_counts(groups: Path) -> None:
    (groups / "pods" / "one" / "cpu.max").write_text("max 100000\n")
    (groups / "pods" / "cpu.max").write_text("200000 100000\n")
    (groups / "cpu.max").write_text("600000 100000\n")
    assert threads_for(None, 8) == 2


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert threads._limit(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("lists", "ranks", "kept"),
    [
        (["0-1,4-5", "2-3,6-7"], 2, [{0, 1, 4, 5}, {2, 3, 6, 7}]),
        (["0-1", "2-3"], 4, [{0, 1}, {0, 1}, {2, 3}, {2, 3}]),
        (["0", "1", "2", "3"], 2, [{0, 1}, {2, 3}]),
        (["0-7", ""], 2, [set(), set()]),
    ],
)
def test_a_rank_keeps_to_the_nodes_of_its_part_of_the_cores(
    lists: list[str], ranks: int, kept: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, cores in enumerate(lists):
        (tmp_path / f"node{i}").mkdir()
        (tmp_path / f"node{i}" / "cpulist").write_text(f"{cores}\n")
    every, chosen = set(range(8)), list[set[int]]()
    monkeypatch.setattr("os.sched_getaffinity", lambda process: every)
    monkeypatch.setattr("os.sched_setaffinity", lambda process, cores: chosen.append(cores))
    for rank, own in enumerate(kept):
        with on_nodes_of(rank, ranks, tmp_path):
            assert chosen[-1:] == ([own] if own else [])
        assert chosen[-1:] == ([every] if own else [])
