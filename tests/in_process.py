"""Commands of ours run in this process, which spares their imports."""

from __future__ import annotations

import gc
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import typer

from workers.cli import app_of

app = app_of(None)


@cache
def penstock() -> Any:
    """The command with all of its commands, which take a while to be made."""
    return typer.main.get_command(app)


def start(module: str, *arguments: str) -> None:
    """Runs it as `python -m` does. Raises SystemExit where it fails."""
    with unchanged(), patch.object(sys, "argv", [module, *arguments]), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it is imported already
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise


@contextmanager
def unchanged() -> Iterator[None]:
    """Afterwards torch's threads, the cores that this process may use and the garbage collector are as before."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        os.sched_setaffinity(0, cores)
        gc.enable()
