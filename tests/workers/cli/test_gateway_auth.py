"""Whether a gateway asks for keys: by its address, by --auth, by --insecure."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from tests.processes import free_port
from tests.waiting import PATIENCE_S, until
from tests.warm import Forked
from tests.workers.cli.conftest import Run
from workers.cli.exits import Failure
from workers.cli.gateway import effective_auth, is_loopback


@pytest.mark.parametrize(
    ("auth", "insecure", "host", "holds"),
    [
        (None, False, "127.0.0.1", "none"),
        (None, False, "localhost", "none"),
        (None, False, "::1", "none"),
        (None, False, "0.0.0.0", "keys"),
        (None, False, "", "keys"),
        (None, False, "::", "keys"),
        (None, False, "192.0.2.1", "keys"),
        ("keys", False, "127.0.0.1", "keys"),
        ("keys", False, "0.0.0.0", "keys"),
        ("none", False, "127.0.0.1", "none"),
        ("none", True, "0.0.0.0", "none"),
    ],
)
def test_a_gateway_asks_for_keys_unless_this_machine_alone_reaches_it(
    auth: str | None, insecure: bool, host: str, holds: str
) -> None:
    assert effective_auth(auth, insecure, host) == holds


@pytest.mark.parametrize(("auth", "insecure", "host"), [("none", False, "0.0.0.0"), ("none", False, "192.0.2.1")])
def test_a_gateway_without_keys_for_other_machines_is_refused(auth: str, insecure: bool, host: str) -> None:
    with pytest.raises(Failure, match="--insecure"):
        effective_auth(auth, insecure, host)


def test_what_cannot_be_looked_up_counts_as_reached_by_others() -> None:
    assert not is_loopback("unknown.invalid")


@pytest.mark.parametrize("command", ["gateway", "up"])
@pytest.mark.parametrize(
    ("said", "why"),
    [
        (("--auth", "none", "--host", "0.0.0.0"), "--insecure"),
        (("--auth", "keys", "--insecure"), "--insecure is for --auth none"),
        (("--insecure",), "--insecure is for --auth none"),
        (("--auth", "password"), "it must be keys or none"),
    ],
)
def test_both_commands_refuse_it_before_anything_starts(
    run: Run, tmp_path: Path, command: str, said: tuple[str, ...], why: str
) -> None:
    more = ("--broker", "redis://127.0.0.1:1/0") if command == "gateway" else ("--data-dir", str(tmp_path / "data"))
    ran = run(command, "--port", "0", *more, *said)
    assert (ran.status, why in " ".join(ran.err.split())) == (2, True)
    assert not (tmp_path / "data").exists()


def test_a_gateway_says_at_its_start_whether_it_asks_for_keys(valkey_url: str, tmp_path: Path) -> None:
    for host, status, says in (("0.0.0.0", 401, "API keys: keys"), ("127.0.0.1", 200, "API keys: none")):
        port = free_port()
        argv = [sys.executable, "-m", "workers.cli", "gateway", "--broker", valkey_url, "--host", host]
        argv += ["--port", str(port), "--files-dir", str(tmp_path)]
        process = Forked(argv, {}, tmp_path / f"{status}.log")
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: _status(f"{url}/livez") == 200)  # noqa: B023 - called at once
            assert _status(f"{url}/v1/models") == status
        finally:
            process.terminate()
            process.wait()
        assert says in (tmp_path / f"{status}.log").read_text()


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=PATIENCE_S).status_code
    except httpx.TransportError:
        return 0
