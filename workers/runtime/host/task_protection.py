"""Protects this worker's ECS task from scale-in and deployments while it holds Penstock's tasks.

ECS chooses by itself which tasks of a service end, among those that are not protected. It tells a container in
`ECS_AGENT_URI` where its agent is asked for that; the task's role needs ecs:UpdateTaskProtection. One worker runs in an
ECS task: two would lift each other's protection.

| dies after, or between | what stands | so |
| --- | --- | --- |
| a FETCH, before the protection | a busy task that ECS may end | it gets SIGTERM, and drains |
| the protection set | nothing: the process was its task's essential container | ECS starts another task |
| it hangs, the protection set | a protected task | the protection lapses after EXPIRES_MIN |
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from typing import Any, Final

logger = logging.getLogger(__name__)

VARIABLE: Final = "ECS_AGENT_URI"
#: Interval (s) of looks whether anything is held; and an answer's time limit.
LOOK_S: Final = 1.0
ANSWER_S: Final = 5.0
#: How long a protection holds (min), when it is renewed (s), and how long it stays at least (s): ECS throttles.
EXPIRES_MIN: Final = 30
RENEW_S: Final = 600.0
LEAST_S: Final = 10.0
#: Pause (s) after a refusal.
RETRY_S: Final = 30.0


class TaskProtection(threading.Thread):
    """Follows `holds()`: whether this worker holds anything."""

    def __init__(self, holds: Callable[[], bool], agent: str) -> None:
        super().__init__(name="task-protection", daemon=True)
        self._holds = holds
        self._url = agent.rstrip("/") + "/task-protection/v1/state"
        self._since: float | None = None
        """When the protection was last set; None while there is none."""
        self._silent = False
        # Never by a proxy: the address means this very machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._stopped = threading.Event()

    @classmethod
    def follow(cls, holds: Callable[[], bool]) -> None:
        """Begin, in an ECS task; anywhere else there is nothing to do."""
        if agent := os.environ.get(VARIABLE):
            cls(holds, agent).start()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            try:
                self._follow(self._holds(), time.monotonic())
                pause = LOOK_S
            except (OSError, ValueError, HTTPException) as error:
                if not self._silent:
                    logger.warning("%s. ECS may end this task while it is busy; it then drains. Asking again", error)
                self._silent, pause = True, RETRY_S

    def _follow(self, holds: bool, now: float) -> None:
        """Raises OSError, ValueError, HTTPException."""
        age = float("inf") if self._since is None else now - self._since
        if holds and age >= RENEW_S:
            self._put({"ProtectionEnabled": True, "ExpiresInMinutes": EXPIRES_MIN})
            self._since = now
        elif not holds and self._since is not None and age >= LEAST_S:
            self._put({"ProtectionEnabled": False})
            self._since = None

    def _put(self, state: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url, json.dumps(state).encode(), headers, method="PUT")  # noqa: S310 - the agent's
        try:
            with self._opener.open(request, timeout=ANSWER_S) as answer:
                said = answer.read(65_536)
        except urllib.error.HTTPError as error:
            said = error.read(65_536) or str(error).encode()
        if not _took(said):
            raise OSError(f"the ECS agent did not set the task's protection: {said[:500].decode(errors='replace')}")
        self._silent = False


def _took(said: bytes) -> bool:
    """Whether an answer says that the state was set. A refusal is `failure` or `error`, with 200 or without."""
    try:
        answer = json.loads(said)
    except ValueError:
        return False
    return isinstance(answer, dict) and isinstance(answer.get("protection"), dict)
