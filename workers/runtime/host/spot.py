"""Asks AWS's instance metadata whether the machine is about to be taken away, and drains in the time that is left.

Of a spot instance, `spot/instance-action` is there two minutes before it is stopped or terminated. Of an instance in an
Auto Scaling group, `autoscaling/target-lifecycle-state` is `Terminated` once the group ends it; a lifecycle hook keeps
it until its workers have drained. ECS and Fargate say the same by SIGTERM, Kubernetes by `penstock drain` in a preStop
hook: those need nothing of this.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Final

logger = logging.getLogger(__name__)

#: The address is the same in every region; IPv6 instances have another (`--spot-metadata-url`).
ENDPOINT: Final = "http://169.254.169.254"
#: Seconds between two looks, as AWS recommends; that an answer may take; and that a token is good for.
PERIOD_S: Final = 5.0
ANSWER_S: Final = 2.0
TOKEN_S: Final = 21_600
#: Time (s) reserved before the instance's end for handing back and shutting down.
MARGIN_S: Final = 5.0
#: Assumed time left (s) if the notice's time cannot be read.
UNTOLD_S: Final = 60.0


class SpotNotice(threading.Thread):
    """`found(seconds, why)` is called once: how long there is left for draining. Only where it is started."""

    def __init__(self, found: Callable[[float, str], None], endpoint: str | None = None) -> None:
        super().__init__(name="spot-notice", daemon=True)
        self._found = found
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
                    self._found(*notice)
                    return
            if self._stopped.wait(PERIOD_S):
                return

    def _notice(self) -> tuple[float, str] | None:
        """Seconds for draining, and why; None while the machine stays. Raises as `_read`."""
        spot = self._read("spot/instance-action")
        if spot is not None:
            return left_of(spot, datetime.now(UTC))
        if self._read("autoscaling/target-lifecycle-state") == b"Terminated":
            return math.inf, "The Auto Scaling group ends this instance"
        return None

    def _read(self, name: str) -> bytes | None:
        """An entry of the metadata; None where there is none. Raises OSError, ValueError, HTTPException."""
        for _ in range(2):
            if not self._token:
                self._token = self._ask(
                    "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
                ).decode("ascii")
            try:
                return self._ask("GET", f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401:
                    raise
                self._token = ""  # it is good for no longer
        raise OSError("a fresh token was refused")

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> bytes:
        request = urllib.request.Request(self._endpoint + path, method=method, headers=headers)  # noqa: S310 - http, or what the operator said
        with self._opener.open(request, timeout=ANSWER_S) as answer:
            data: bytes = answer.read(65_536)
            return data


def left_of(notice: bytes, now: datetime) -> tuple[float, str]:
    """Seconds for draining, and why, of `{"action": "terminate", "time": "2026-01-01T00:00:00Z"}`."""
    try:
        said = json.loads(notice)
        action, at = str(said["action"]), datetime.fromisoformat(said["time"])
        left = (at - now).total_seconds() - MARGIN_S
    except (ValueError, KeyError, TypeError) as error:
        return UNTOLD_S, f"A spot notice that cannot be read came ({notice[:200]!r}: {error})"
    return max(0.0, left), f"A spot notice came: {action} at {at:%H:%M:%S} UTC"
