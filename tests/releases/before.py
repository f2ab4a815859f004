"""The release before this one, as its wheel has it: its files, and its functions in a process of its own."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.processes import ROOT, guarded
from tests.waiting import PATIENCE_S

(WHEEL,) = Path(__file__).parent.glob("*.whl")
NATIVE = Path("engine/kernels/native")
#: Modules by their name in this release -> in the release before.
MOVED = {
    "producers.contract.leases": "producers.connection.alive",
    "producers.client.leases": "producers.sweeper.reader_leases",
}

#: Arguments by their name in this release -> in the release before.
RENAMED = {"sort_limit": "bite"}

#: Calls functions by name, with values that came by pickle: of its own release's classes, and so are the answers.
SERVE = """
import importlib, pickle, sys
asked, answers = sys.stdin.buffer, sys.stdout.buffer
while True:
    try:
        module, name, args, kwargs = pickle.load(asked)
    except EOFError:
        break
    try:
        answer = True, getattr(importlib.import_module(module), name)(*args, **kwargs)
    except Exception as error:
        answer = False, f"{type(error).__name__}: {error}"
    pickle.dump(answer, answers)
    answers.flush()
"""


def unpack(folder: Path) -> None:
    """The wheel's files, with native kernels of this tree: both releases have the same."""
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    for library in (ROOT / NATIVE).glob("*.so"):
        shutil.copy(library, folder / NATIVE)


class Before:
    """A process that imports the release before from where it was unpacked."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(folder)}
        argv = guarded(sys.executable, "-P", "-c", SERVE)
        self._process = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=-1
        )
        if self.call("importlib.util", "find_spec", "producers").origin != str(folder / "producers" / "__init__.py"):
            raise RuntimeError(f"the release before was not imported from {folder}")

    def call(self, module: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """What a function answers. Raises RuntimeError where it raises."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked
        assert answers
        pickle.dump((module, name, args, kwargs), asked)
        asked.flush()
        fine, answer = pickle.load(answers)
        if not fine:
            raise RuntimeError(f"{module}.{name} of the release before: {answer}")
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


class Functions:
    """The functions of a module, as the release before has them."""

    def __init__(self, before: Before, module: ModuleType) -> None:
        self._before, self._module = before, module

    def __getattr__(self, name: str) -> Any:
        module = MOVED.get(self._module.__name__, self._module.__name__)

        def call(*args: Any, **kwargs: Any) -> Any:
            named = {RENAMED.get(argument, argument): value for argument, value in kwargs.items()}
            return self._before.call(module, name, *args, **named)

        return call
