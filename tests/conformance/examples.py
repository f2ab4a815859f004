"""Runs the examples of a page as they are written, against a system that is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.javascript import run_source
from tests.processes import free_port

LANGUAGES = ("bash", "python", "javascript")


def examples_of(page: str) -> list[Any]:
    """Parameters of a test: section, language and source of each example of a page. One of each section is in
    `make test`, each time another language."""
    return [
        pytest.param(
            *(section, language, source),
            id=f"{section}-{language}-{place}" if place else f"{section}-{language}",
            marks=() if place == 0 and LANGUAGES.index(language) == number % 3 else pytest.mark.exhaustive,
        )
        for number, (section, text) in enumerate(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
        for language in LANGUAGES
        for place, source in enumerate(re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S))
    ]


@dataclass(frozen=True)
class Running:
    """The system with a sweeper, and with webhooks that may go to this machine."""

    folder: Path
    url: str
    env: dict[str, str]
    """Names the server that a `penstock up` in the folder would have."""

    def run(self, language: str, source: str) -> subprocess.CompletedProcess[str]:
        """Run an example as if this system had the usual port."""
        source = source.replace("http://127.0.0.1:8000", self.url).replace("9000", str(free_port()))
        if language == "javascript":
            return run_source(source)
        if language == "bash" and shutil.which("curl") is None:
            pytest.skip("no curl on this machine")
        command = ["bash", "-euc"] if language == "bash" else [sys.executable, "-c"]
        env = {**os.environ, **self.env}
        return subprocess.run([*command, source], cwd=self.folder, env=env, capture_output=True, text=True, timeout=240)
