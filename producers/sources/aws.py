"""AWS's services for asyncio: boto3's calls, made by threads of their own."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from producers.connection.aws import AwsError, aws_errors, client

THREADS: Final = 8
#: The region in the URL of a queue, and in an ARN.
_REGION: Final = re.compile(r"https?://sqs\.([a-z0-9-]+)\.|arn:[a-z-]+:[a-z0-9]+:([a-z0-9-]+):")
#: AWS's codes for a message that is too large, among other things.
TOO_LARGE: Final = frozenset({"InvalidParameterValue", "InvalidParameter", "InvalidMessageContents", "MessageTooLong"})


class Service:
    """A boto3 client that asyncio may call. It is made at the first call. `close` it."""

    def __init__(self, service: str, region: str | None, endpoint_url: str | None = None, *, wait_s: float = 0) -> None:
        """Arguments as of `producers.connection.aws.client`. A call that waits at the server takes one of THREADS
        threads."""
        self._service = service
        self._client_arguments = (service, region, endpoint_url)
        self._wait_s = wait_s
        self._client: Any = None
        self._threads = ThreadPoolExecutor(THREADS, f"{service}-sources")

    async def call(self, operation: str, doing: str, **arguments: Any) -> dict[str, Any]:
        """boto3's answer. `operation`: such as `delete_message`; `doing` as of `producers.connection.aws.aws_errors`.

        A cancelled call goes on in its thread. Raises AwsError.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, operation, doing, arguments)

    def _call(self, operation: str, doing: str, arguments: dict[str, Any]) -> dict[str, Any]:
        name = "".join(map(str.capitalize, operation.removesuffix("_batch").split("_")))
        if self._client is None:
            self._client = client(*self._client_arguments, wait_s=self._wait_s)
        with aws_errors(doing, f"{self._service}:{name}"):
            answer: dict[str, Any] = getattr(self._client, operation)(**arguments)
        return answer

    def close(self) -> None:
        """Let the threads end once their calls have."""
        self._threads.shutdown(wait=False)


def region_of(address: str) -> str | None:
    """Returns the region in a queue's URL or in an ARN; None if it has none."""
    match = _REGION.match(address)
    return match and (match[1] or match[2])


def last_part(address: str) -> str:
    """The name of a queue or topic, by its URL or ARN."""
    return re.split("[/:]", address)[-1]


def too_large(error: BaseException) -> bool:
    """Whether a shorter message may be taken."""
    return isinstance(error, AwsError) and error.code in TOO_LARGE
