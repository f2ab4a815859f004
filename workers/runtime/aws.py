"""Reads from AWS what happens to a worker's machine, and reports the worker to AWS.

`SpotNotice` asks the instance metadata whether the machine is about to be taken away, and the worker drains in the
remaining time. For a spot instance, `spot/instance-action` is there two minutes before it is stopped or terminated. For
an instance in an Auto Scaling group, `autoscaling/target-lifecycle-state` is `Terminated` once the group ends it; a
lifecycle hook keeps it until its workers have drained. ECS and Fargate send SIGTERM, Kubernetes runs `penstock drain`
in a preStop hook: those need nothing of this.

`TaskProtection` protects this worker's ECS task from scale-in and deployments while it holds Penstock's tasks. ECS
chooses by itself which tasks of a service end, among those that are not protected. `ECS_AGENT_URI` in a container names
the agent that sets the protection; the task's role needs ecs:UpdateTaskProtection. One worker runs in an ECS task: two
would lift each other's protection.

| dies after, or between | what stands | so |
| --- | --- | --- |
| a FETCH, before the protection | a busy task that ECS may end | it gets SIGTERM, and drains |
| the protection set | nothing: the process was its task's essential container | ECS starts another task |
| it hangs, the protection set | a protected task | the protection lapses after EXPIRES_MIN |
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any, Final

logger = logging.getLogger(__name__)

#: The address is the same in every region; IPv6 instances have another (`--spot-metadata-url`).
ENDPOINT: Final = "http://169.254.169.254"
#: Seconds between two looks, as AWS recommends; that an answer may take; and that a token is good for.
NOTICE_PERIOD_S: Final = 5.0
METADATA_ANSWER_S: Final = 2.0
TOKEN_S: Final = 21_600
#: Time (s) reserved before the instance's end for handing back and shutting down.
MARGIN_S: Final = 5.0
#: Assumed remaining time (s) if the notice's time cannot be read.
ASSUMED_S: Final = 60.0

#: The environment variable with the ECS agent's URL.
AGENT_VARIABLE: Final = "ECS_AGENT_URI"
#: Interval (s) of looks whether anything is held; and the time limit of the agent's answer.
LOOK_S: Final = 1.0
AGENT_ANSWER_S: Final = 5.0
#: How long a protection holds (min), when it is renewed (s), and how long it stays at least (s): ECS throttles.
EXPIRES_MIN: Final = 30
RENEW_S: Final = 600.0
LEAST_S: Final = 10.0
#: Pause (s) after a refusal.
RETRY_S: Final = 30.0


class SpotNotice(threading.Thread):
    """`on_notice(seconds, why)` is called once: how much time remains for draining. Runs only if it is started."""

    def __init__(self, on_notice: Callable[[float, str], None], endpoint: str | None = None) -> None:
        super().__init__(name="spot-notice", daemon=True)
        self._on_notice = on_notice
        self._endpoint = (endpoint or ENDPOINT).rstrip("/")
        self._token = ""
        self._silent = False
        # Never by a proxy: the address means this very machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while True:
            try:
                notice = self._notice()
            except (OSError, ValueError, HTTPException) as error:
                self._token = ""  # what it was given may have been no token, by a proxy that was not up yet, say
                if not self._silent:
                    logger.warning(
                        "The instance's metadata at %s cannot be read (%s), so its end would not be seen. In a "
                        "container, the instance's hop limit must be 2 (HttpPutResponseHopLimit). Asking again",
                        self._endpoint,
                        error,
                    )
                self._silent = True
            else:
                self._silent = False
                if notice is not None:
                    self._on_notice(*notice)
                    return
            if self._stopped.wait(NOTICE_PERIOD_S):
                return

    def _notice(self) -> tuple[float, str] | None:
        """Seconds for draining, and why; None while the machine stays. Raises as `_read`."""
        spot = self._read("spot/instance-action")
        if spot is not None:
            return parse_notice(spot, datetime.now(UTC))
        if self._read("autoscaling/target-lifecycle-state") == b"Terminated":
            return math.inf, "The Auto Scaling group ends this instance"
        return None

    def _read(self, name: str) -> bytes | None:
        """Reads an entry of the metadata; None if there is none. Raises OSError, ValueError, HTTPException."""
        for _ in range(2):
            if not self._token:
                self._token = self._request(
                    "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                ).decode("ascii")
            try:
                return self._request("GET", f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401:
                    raise
                self._token = ""  # it is good for no longer
        raise OSError("a fresh token was refused")

    def _request(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        request = urllib.request.Request(self._endpoint + path, method=method, headers=headers)  # noqa: S310 - http, or what the operator said
        with self._opener.open(request, timeout=METADATA_ANSWER_S) as answer:
            data: bytes = answer.read(65_536)
            return data


def parse_notice(notice: bytes, now: datetime) -> tuple[float, str]:
    """Seconds for draining, and why, of `{"action": "terminate", "time": "2026-01-01T00:00:00Z"}`."""
    try:
        fields = json.loads(notice)
        action, at = str(fields["action"]), datetime.fromisoformat(fields["time"])
        remaining = (at - now).total_seconds() - MARGIN_S
    except (ValueError, KeyError, TypeError) as error:
        return ASSUMED_S, f"A spot notice that cannot be read came ({notice[:200]!r}: {error})"
    return max(0.0, remaining), f"A spot notice came: {action} at {at:%H:%M:%S} UTC"


class TaskProtection(threading.Thread):
    """Protects the task as long as `holds()` returns that this worker holds anything."""

    def __init__(self, holds: Callable[[], bool], agent: str) -> None:
        super().__init__(name="task-protection", daemon=True)
        self._holds = holds
        self._url = agent.rstrip("/") + "/task-protection/v1/state"
        self._since: float | None = None
        """When the protection was last set (monotonic); None if it is not."""
        self._silent = False
        # Never by a proxy: the address means this very machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._stopped = threading.Event()

    @classmethod
    def follow(cls, holds: Callable[[], bool]) -> None:
        """Starts the thread in an ECS task; does nothing anywhere else."""
        if agent := os.environ.get(AGENT_VARIABLE):
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
            with self._opener.open(request, timeout=AGENT_ANSWER_S) as answer:
                body = answer.read(65_536)
        except urllib.error.HTTPError as error:
            body = error.read(65_536) or str(error).encode()
        if not _accepted(body):
            raise OSError(f"the ECS agent did not set the task's protection: {body[:500].decode(errors='replace')}")
        self._silent = False


def _accepted(body: bytes) -> bool:
    """Returns whether an answer confirms the state. A refusal is `failure` or `error`, with 200 or without."""
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    return isinstance(answer, dict) and isinstance(answer.get("protection"), dict)
