"""Runs boto3's blocking calls on a thread, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from producers.connection.aws import AwsError, AwsNotInstalled, client
from workers.autoscaler.actuators.base import ActuatorError, Address

T = TypeVar("T")

#: Options of the URLs; `endpoint`: another server than AWS's.
OPTIONS: Final = ("region", "endpoint")
#: Silence (s) after which a request is tried once more, within the time limit of a call (`workers.autoscaler.acting`).
SILENT_S: Final = 4.0


class Calls:
    """`client`: of the service, for use within `run`."""

    def __init__(self, name: str, service: str, address: Address) -> None:
        """Raises ModuleNotFoundError without boto3, ValueError without a region."""
        try:
            self.client: Any = client(
                service, address.options.get("region"), address.options.get("endpoint"), silent_s=SILENT_S
            )
        except AwsNotInstalled as error:
            raise ModuleNotFoundError(str(error), name="boto3") from error
        except AwsError as error:
            raise ValueError(f"{name}: {str(error).rstrip('.')}: give ?region=REGION") from error
        self._name = name
        # One thread: what hangs holds up the next call alone, which its time limit ends.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="actuator")

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function of blocking calls. AwsError becomes ActuatorError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except AwsError as error:
            raise ActuatorError(f"{self._name}: {error}") from error

    async def aclose(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.client.close()
