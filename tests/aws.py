"""AWS on loopback: moto's server, a process of its own, and clients of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tests.processes import free_port, guarded
from tests.waiting import PATIENCE_S

REGION: Final = "us-east-1"
ACCOUNT: Final = "123456789012"
#: What boto3 finds, here and in the processes that tests start.
CREDENTIALS: Final = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
}
_RUN: Final = "from moto.server import main; import sys; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Aws:
    """A server that speaks SQS, S3, SNS and EventBridge. `url`: its endpoint, for all of them."""

    url: str

    def broker(self, prefix: str = "pen-", **more: str) -> str:
        """A broker's URL."""
        options = "".join(f"&{name}={value}" for name, value in more.items())
        return f"sqs://{REGION}?prefix={prefix}&endpoint_url={self.url}{options}"

    def client(self, service: str) -> Any:
        import boto3

        return boto3.client(service, region_name=REGION, endpoint_url=self.url)

    def messages(self) -> dict[str, int]:
        """SQS queue -> its messages, waiting, hidden or delayed."""
        sqs, counts = self.client("sqs"), ("", "NotVisible", "Delayed")
        names = [f"ApproximateNumberOfMessages{count}" for count in counts]
        found = {}
        for url in sqs.list_queues().get("QueueUrls", []):
            said = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
            found[url.rpartition("/")[2]] = sum(int(said[name]) for name in names)
        return found

    def reset(self) -> None:
        """Everything in it is gone."""
        self._ask("/moto-api/reset", b"")

    @contextmanager
    def enforcing(self) -> Iterator[None]:
        """Within it, requests need credentials of a user or role whose policies allow them."""
        self._ask("/moto-api/reset-auth", b"0")
        try:
            yield
        finally:
            self._ask("/moto-api/reset-auth", b"inf")

    def _ask(self, path: str, data: bytes | None = None) -> Any:
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "text/plain"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())


@contextmanager
def running_aws() -> Iterator[Aws]:
    """A server on a free port, which ends with the block."""
    os.environ.update(CREDENTIALS)
    port = free_port()
    command = guarded(sys.executable, "-c", _RUN, "-H", "127.0.0.1", "-p", str(port))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    aws = Aws(f"http://127.0.0.1:{port}")
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not _answers(aws):
            assert process.poll() is None, "moto's server ended"
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.05)
        yield aws
    finally:
        process.kill()
        process.wait()


def _answers(aws: Aws) -> bool:
    try:
        aws.reset()
    except OSError:
        return False
    return True
