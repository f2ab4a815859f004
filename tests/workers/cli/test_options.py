"""Commands find the system in one way: options that several have are the same in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import penstock
from tests.workers.cli.conftest import Run
from workers.cli.servers import addresses, files_of

#: Options that find a system -> environment variable.
FINDS = {"--url": "PENSTOCK_URL", "--broker": "BROKER_URL", "--store": "STORE_URL", "--data-dir": None}
SAME = {**FINDS, "--files-dir": "FILES_DIR"}
#: Commands that reach a broker, and no store.
NO_STORE = {"aws policy"}
#: Commands that look for the servers of a data directory alone.
OF_THIS_MACHINE = {"url"}


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All commands by name, those of groups with the group's name before it."""
    for part, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name}{part} ")
        else:
            yield f"{name}{part}", command


COMMANDS = dict(commands(penstock()))


def options(command: Any) -> dict[str, Any]:
    return {option.opts[0]: option for option in command.params}


@pytest.mark.parametrize("name", SAME)
def test_an_option_that_finds_the_system_is_the_same_in_all_commands(name: str) -> None:
    variants = {
        (option.default, option.envvar, option.required, option.help)
        for command in COMMANDS.values()
        if (option := options(command).get(name)) is not None
    }
    assert len(variants) == 1
    ((_, variable, required, _),) = variants
    assert (variable, required) == (SAME[name], False)


def test_commands_that_reach_the_servers_take_all_that_finds_them() -> None:
    for name, command in COMMANDS.items():
        has = FINDS.keys() & options(command).keys() - {"--url"}
        expected = {"--broker", "--store", "--data-dir"} - ({"--store"} if name in NO_STORE else set())
        assert has in (set(), expected) or name in OF_THIS_MACHINE, name


class TestServers:
    @pytest.fixture(autouse=True)
    def elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for name in ("BROKER_URL", "STORE_URL"):
            monkeypatch.delenv(name, raising=False)
        for directory, port in ((".penstock", 1), ("other", 2)):
            (tmp_path / directory).mkdir()
            (tmp_path / directory / "port").write_text(f"{port}\n")

    def test_are_found_in_this_directory_by_any_command(self, run: Run) -> None:
        for command in (("keys", "ls"), ("scale", "ls"), ("worker", "--model", "tiny"), ("backup", "there")):
            ran = run(*command)
            assert (ran.status, "redis://127.0.0.1:1/0" in ran.err) == (3, True), ran.err

    def test_of_a_data_directory_go_before_the_environment(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("BROKER_URL", "redis://127.0.0.1:3/0")
        assert "127.0.0.1:3" in run("scale", "ls").err
        for command in (("keys", "ls"), ("scale", "ls"), ("worker", "--model", "tiny")):
            assert "127.0.0.1:2" in run(*command, "--data-dir", "other").err

    def test_are_not_named_twice(self, run: Run) -> None:
        for option in ("--broker", "--store"):
            ran = run("scale", "ls", "--data-dir", "other", option, "redis://127.0.0.1:1/0")
            assert (ran.status, "not both" in ran.err) == (2, True)

    def test_have_their_files_beside_them(self) -> None:
        other = Path("other")
        assert addresses(None, None, other) == ("redis://127.0.0.1:2/0", "redis://127.0.0.1:2/0")
        assert (files_of(None, other), files_of(None, None)) == ("other/files", ".penstock/files")
        assert files_of("s3://bucket/files", other) == "s3://bucket/files"
