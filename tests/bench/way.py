"""Lists the files that a request goes through, from HTTP to its tokens: `python -m tests.bench.way`.

A `penstock up` with the bundled model, whose processes count the calls of Penstock's functions (`traced`), and its
store's MONITOR. After a first request, in turns: a period with one request, and one without that is as long. A function
is on the way if each period with the request has more calls of it than all without; periodic duties are not. Printed:
these functions' files by process and thread, with the C++ file that they call, and the scripts that are called. Behind
`>`: files from which the way goes on into others; the rest only answer, so a reader may take them by their names.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from redis import Redis
from redis.exceptions import RedisError

from producers.connection.local import urls_in
from producers.connection.script import script
from tests.processes import ROOT, free_port, guarded
from workers.cli.client import Gateway

#: Time (s) between two periods: longer than clients believe what they know of a model.
REST_S: Final = 2.5
#: Time (s) that what a task leaves behind may take.
SETTLE_S: Final = 0.5
MODEL: Final = {"model": "tiny", "max_tokens": 24}
CALLS_NATIVE: Final = "engine/kernels/native/layers.py"
NATIVE: Final = "engine/kernels/native/penstock.cpp"
#: Calls by process, thread, file, function; and whether they are of it, or by it of other files' functions.
Calls = Counter[tuple[str, str, str, str, str]]


class System:
    """A running system. `folder`: of its data, and of its processes' sockets."""

    def __init__(self, folder: Path, url: str) -> None:
        self._folder, self._gateway = folder, Gateway(url)
        self._scripts: Calls = Counter()
        threading.Thread(target=self._listen, daemon=True).start()

    def chat(self) -> None:
        said = [{"role": "user", "content": "Say it."}]
        assert "".join(self._gateway.chat({**MODEL, "messages": said}))

    def task(self) -> None:
        made = self._gateway.submit({**MODEL, "prompt": "def fibonacci(n):"})
        assert [event["event"] for event in self._gateway.events(made["id"])][-1] == "end"

    def during(self, request: Callable[[], None]) -> tuple[Calls, float]:
        """All calls during a request and shortly after, and the time (s) that was."""
        time.sleep(REST_S)
        self._calls()
        began = time.monotonic()
        request()
        time.sleep(SETTLE_S)
        return self._calls(), time.monotonic() - began - SETTLE_S

    def _calls(self) -> Calls:
        """All calls since the last time."""
        found, self._scripts = self._scripts, Counter()
        for path in self._folder.glob("*.sock"):
            with socket.socket(socket.AF_UNIX) as asked, contextlib.suppress(ConnectionRefusedError):  # it has ended
                asked.connect(str(path))
                argv, calls = json.loads(asked.makefile("rb").read())
                for thread, file, name, count, onward in calls:
                    place = _process(argv), re.sub(r"[-_:]?\d.*", "", thread), file, name
                    found[*place, " "] += count
                    found[*place, ">"] += onward
        return found

    def _listen(self) -> None:
        files = [file.relative_to(ROOT) for file in (ROOT / "producers").rglob("scripts/[a-z]*.lua")]
        names = {script(".".join(file.parts[:-2]), file.stem).sha: str(file) for file in files}
        store = Redis.from_url(urls_in(self._folder)[1])
        with store.monitor() as monitor, contextlib.suppress(RedisError):  # it ends with the system
            for said in monitor.listen():
                words = said["command"].split()
                if words[0].upper() in ("EVALSHA", "EVALSHA_RO"):
                    self._scripts["store", "scripts", names.get(words[1], f"EVALSHA {words[1]}"), "", " "] += 1


def _process(argv: list[str]) -> str:
    """The name of a process: its command, or its module."""
    words = [word for word in argv[1:] if not word.startswith("-")]
    return " ".join(words[1:2]) if words[0] == "workers.cli" else words[0]


@contextlib.contextmanager
def running() -> Iterator[System]:
    with tempfile.TemporaryDirectory(prefix="penstock-way-") as name:
        shutil.copy(Path(__file__).with_name("traced.py"), Path(name) / "sitecustomize.py")
        (Path(name) / "root").write_text(str(ROOT))
        port = free_port()
        argv = guarded(sys.executable, "-m", "workers.cli", "up", "--port", str(port), "--data-dir", name)
        process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{name}:{ROOT}"}, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        try:
            assert any(b"ready" in line for line in process.stdout), "the system did not start"
            yield System(Path(name), f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.communicate()


def way(system: System, request: Callable[[], None], rounds: int) -> dict[str, dict[str, str]]:
    """Process and thread -> file -> `>` where the way goes on from there into other files."""
    request()
    with_it, without = [], []
    for _ in range(rounds):
        calls, took = system.during(request)
        with_it.append(calls)
        without.append(system.during(partial(time.sleep, took))[0])
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for call in sorted(with_it[0]):
        process, thread, file, _, how = call
        if min(calls[call] for calls in with_it) > max(calls[call] for calls in without):
            files = found[f"{process}: {thread}"]
            files[file] = max(files.get(file, " "), how)
            if file == CALLS_NATIVE:
                files |= {file: ">", NATIVE: " "}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    with running() as system:
        for request in (system.chat, system.task):
            found = way(system, request, args.rounds)
            scripts = found.get("store: scripts", {})
            threads = [files for place, files in found.items() if files is not scripts]
            onward = {file for files in threads for file, how in files.items() if how == ">"}
            print(f"{request.__name__}: {len(set().union(*threads))} files ({len(onward)} go on into others), ", end="")
            print(f"{len(scripts)} scripts, {len(threads)} threads")
            for place, files in sorted(found.items()):
                print(f"  {place}: {len(files)}", *(f"{files[file]} {file}" for file in sorted(files)), sep="\n    ")


if __name__ == "__main__":
    main()
