"""The stage itself: what attacks are made of does what it says, so that a defence is what fails an attack."""

from __future__ import annotations

import socket

from tests.chaos.hostile.stage import stage, status_of
from tests.waiting import until


def test_a_stage_has_finished_tasks_unread_answers_and_keys_that_end() -> None:
    with stage() as hostile:
        task_id = hostile.finished("attacker", tokens=700, logprobs=2)
        result = hostile.http("attacker", "GET", f"/v1/tasks/{task_id}").json()
        assert (result["status"], len(result["choices"][0]["token_ids"])) == ("completed", 700)
        assert hostile.http("victim", "GET", f"/v1/tasks/{task_id}").status_code == 404
        link = hostile.unread("attacker", f"/v1/tasks/{task_id}/events")
        kept = link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        assert kept < 10_000
        assert status_of(link) == 200
        hostile.revoke("attacker")
        until(lambda: hostile.http("attacker", "GET", "/v1/tasks").status_code == 401)
        assert hostile.http("victim", "GET", "/v1/tasks").status_code == 200
