"""A child's leases end with it, and nobody else's."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest
from redis import Redis

from producers.contract import keys
from tests.workers.processes.test_supervisor import begun, said
from workers.processes.supervisor import Child, Program

TELLS = """
import os, socket, sys, time
ours = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
address = os.environ["NOTIFY_SOCKET"].replace("@", "\\0", 1)
for lease in ("first", "second"):
    ours.sendto(f"X_PENSTOCK_LEASE={lease}".encode(), address)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who sent a datagram")
async def test_what_the_child_told_of_itself_is_ended(valkey: Redis, valkey_url: str) -> None:
    for lease in ("first", "second", "another's"):
        valkey.set(keys.lease(lease), "{}")
    argv = (sys.executable, "-I", "-S", "-c", TELLS)
    child = Child(Program("it", argv, {"BROKER_URL": valkey_url}, notifies=True), lambda name, line: None)
    pid = await begun(child)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"X_PENSTOCK_LEASE=another's", child.program.env["NOTIFY_SOCKET"].replace("@", "\0", 1))
    os.kill(pid, signal.SIGKILL)
    await said(child, "its lease is ended: returned its 0 deliveries to the queue")
    await child.stop(0.0)
    assert valkey.keys(keys.lease("*")) == [keys.lease("another's").encode()]
