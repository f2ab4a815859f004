"""Web pages that a browser on this machine shows, before a gateway that asks for no keys."""

from __future__ import annotations

import httpx
import pytest

from producers.gateway.http.authorization import is_private
from tests.producers.gateway.conftest import Door, Open

ASKED = "/v1/tasks"


def asked(door: Door, **headers: str) -> tuple[int, str | None]:
    answer = door.http.get(ASKED, headers=headers)
    return answer.status_code, answer.json().get("error", {}).get("code")


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null", "file://", "http://["])
def test_a_page_of_another_origin_may_not_ask(door: Door, origin: str) -> None:
    assert asked(door, origin=origin) == (403, "origin_not_allowed")
    sent = door.http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"{}"}, headers={"origin": origin})
    assert sent.status_code == 403, "browsers send forms without asking first"


def test_pages_of_its_own_and_of_allowed_origins_may_ask(door: Door, open_door: Open) -> None:
    assert asked(door, origin=f"http://127.0.0.1:{door.port}") == (200, None)
    allowing = open_door(cors_origins=("https://chat.example",))
    assert asked(allowing, origin="https://chat.example") == (200, None)
    assert asked(allowing, origin="https://evil.example") == (403, "origin_not_allowed")


def test_a_name_that_points_here_may_not_be_asked_for(door: Door, open_door: Open) -> None:
    rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    assert asked(door, **rebound) == (403, "host_not_allowed")
    assert asked(open_door(insecure=True), **rebound) == (200, None)


def test_with_keys_the_key_alone_decides(open_door: Open) -> None:
    keyed = open_door(auth="keys")
    assert asked(keyed, host="llm.example.org", origin="https://chat.example") == (401, "missing_api_key")


def test_probes_are_open_under_every_name(http: httpx.Client) -> None:
    assert http.get("/livez", headers={"host": "llm.example.org"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "private"),
    [
        *((host, True) for host in ("localhost", "localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "10.0.0.7")),
        *((host, True) for host in ("[::1]:8000", "gateway:8000", "a.localhost", "host.docker.internal:8000")),
        *((host, False) for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.nip.io", "a.internal.x")),
        *((host, False) for host in ("[", "[::1", "user@evil.example", "localhost:8000@evil.example")),
    ],
)
def test_which_names_nobody_can_let_point_here(host: str, private: bool) -> None:
    assert is_private(host) is private
