"""A model's text is shown, and does nothing to the terminal; the error names a standard output that fails."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from producers.store.access.audit import Change
from tests.workers.cli.conftest import Run
from workers.cli.servers import changes_logged_to
from workers.cli.terminal import guarded_stdout, printable

FULL = "penstock: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 🎉", "a\tb\nc é 🎉"),
        ("\x1b[2J\x07", "\u241b[2J\u2407"),
        ("a\rb\x7f", "a\u240db\u2421"),
        ("\x9b31m", "\ufffd31m"),
    ],
)
def test_control_characters_become_visible_on_a_terminal(text: str, shown: str) -> None:
    assert printable(text, terminal=True) == shown


def test_a_file_gets_the_text_as_it_is() -> None:
    assert printable("\x1b[2J\r", terminal=False) == "\x1b[2J\r"


@pytest.fixture(params=["dlq ls", "models ls", "--help"])
def command(request: pytest.FixtureRequest, valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("BROKER_URL", valkey_url)
    return str(request.param).split()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_disk_is_no_server_that_does_not_answer(
    run: Run, command: list[str], unbuffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        full.reconfigure(write_through=unbuffered)
        with monkeypatch.context() as patch:  # over before what captures stdout is
            patch.setattr(sys, "stdout", full)
            ran = run(*command)
    assert (ran.status, ran.err) == (1, FULL)


def test_a_reader_that_went_away_is_told_nothing(run: Run, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `penstock dlq ls | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as broken, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", broken)
        ran = run(*command)
    assert (ran.status, ran.err) == (1, "")


def test_no_output_at_all_is_none_missed(run: Run, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `>&-`."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        ran = run(*command)
    assert (ran.status, ran.err) == (0, "")


def test_what_it_cannot_encode_is_shown_as_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(tmp_path / "out", "w", encoding="utf-8", errors="strict") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with guarded_stdout():
            sys.stdout.write("half \ud800, é\n")
    assert (tmp_path / "out").read_text(encoding="utf-8") == "half \\ud800, é\n"


def test_changes_go_to_a_file_for_a_while_and_one_that_cannot_be_written_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO")
    change = Change("cli:a@b", "model.publish", "m@1")
    with changes_logged_to(tmp_path / "audit.log"):
        change.say()
    assert '"model.publish"' in (tmp_path / "audit.log").read_text()
    with changes_logged_to(tmp_path / "gone" / "audit.log"):
        change.say()
    assert "No such file" in capfd.readouterr().err
    assert not caplog.records
    change.say()
    assert len(caplog.records) == 1
