"""Progress on standard error: rewritten on a terminal, lines elsewhere, nothing where it is not wanted."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from tests.waiting import until
from workers import progress
from workers.progress import Progress, bar, bytes_bar


class Terminal(io.StringIO):
    """A standard error that is a terminal, or is none."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def terminal(monkeypatch: pytest.MonkeyPatch, *, is_one: bool) -> Terminal:
    """Standard error from now on. Not a fixture: pytest sets its own before a test's call."""
    monkeypatch.setattr(progress, "REWRITTEN_S", 0.01)
    monkeypatch.setattr(progress, "BELOW_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    stderr = Terminal(terminal=is_one)
    monkeypatch.setattr(sys, "stderr", stderr)
    return stderr


def test_on_a_terminal_a_line_is_rewritten_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch, is_one=True)
    with Progress() as command:
        command.show("x" * 100)
        until(lambda: shown.getvalue().count("0 s: x") >= 2)
        command.note("a fault")
    lines = shown.getvalue().split("\r\033[K")
    assert lines[0] == lines[-1] == ""
    assert "a fault\n" in lines
    assert max(map(len, lines)) == 29
    assert "\n" not in shown.getvalue().replace("a fault\n", "")


def test_elsewhere_each_line_is_below_the_last_one_and_what_gives_it_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def text() -> str:
        raise FileNotFoundError

    shown = terminal(monkeypatch, is_one=False)
    with Progress() as command:
        command.show(lambda: "12 of 24")
        until(lambda: shown.getvalue().count("\n") >= 2)
        command.show(text)
        command.note("done")
    assert {line.partition("s: ")[2] or line for line in shown.getvalue().splitlines()} == {"12 of 24", "done"}


@pytest.mark.parametrize("is_one", [True, False])
def test_a_quiet_command_shows_nothing(monkeypatch: pytest.MonkeyPatch, is_one: bool) -> None:
    shown = terminal(monkeypatch, is_one=is_one)
    with Progress(quiet=True) as command:
        command.show("x")
        command.note("y")
        assert "penstock-progress" not in [thread.name for thread in threading.enumerate()]
    assert shown.getvalue() == ""


def test_a_bar_is_never_beyond_its_end() -> None:
    assert bar(1, 2) == "[############............]  50%"
    assert (bar(3, 2), bar(0, 0)) == ("[########################] 100%", "")
    assert bytes_bar(500_000, 2_000_000) == "[######..................]  25%  0.5 of 2.0 MB"
    assert bytes_bar(10**9, 4 * 10**9).endswith("  1.0 of 4.0 GB")
