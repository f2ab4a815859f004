"""Every example of docs/api.md runs as it is written, and says what it should."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conformance.javascript import run_source
from tests.processes import free_port
from tests.workers.cli.local.test_up import Up
from workers.processes import PENSTOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
LANGUAGES = ("bash", "python", "javascript")
#: One of each section in `make test`, each time another language.
EXAMPLES = [
    pytest.param(
        *(section, language, source),
        id=f"{section}-{language}",
        marks=() if LANGUAGES.index(language) == number % 3 else pytest.mark.exhaustive,
    )
    for number, (section, text) in enumerate(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
    for language, source in re.findall(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S)
]
#: What an example of each section prints, whatever its language.
SAYS = {
    "Submit and poll": r"completed|queued|in_progress",
    "Stream": r"\S",
    "Background response": r"complete",
    "Webhook": r"whsec_|response\.(completed|incomplete)",
    "Batch": r'"custom_id": ?"a".*"status_code": ?200',
}


@dataclass(frozen=True)
class Running:
    """A `penstock up` in a folder of its own."""

    folder: Path
    url: str

    def run(self, language: str, source: str) -> subprocess.CompletedProcess[str]:
        """Run an example as if this system had the usual port."""
        source = source.replace("http://127.0.0.1:8000", self.url).replace("9000", str(free_port()))
        if language == "javascript":
            return run_source(source)
        if language == "bash" and shutil.which("curl") is None:
            pytest.skip("no curl on this machine")
        command = ["bash", "-euc"] if language == "bash" else [sys.executable, "-c"]
        return subprocess.run([*command, source], cwd=self.folder, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("examples")
    up = Up(folder / ".penstock", "--webhook-allow", "127.0.0.0/8")
    try:
        yield Running(folder, up.wait_ready().url)
    finally:
        up.process.terminate()
        up.process.wait(60)


@pytest.mark.parametrize(("section", "language", "source"), EXAMPLES)
def test_an_example_runs(running: Running, section: str, language: str, source: str) -> None:
    ran = running.run(language, source)
    assert ran.returncode == 0, ran.stderr
    assert re.search(SAYS[section], ran.stdout, re.DOTALL), ran.stdout
    assert not re.search(r'"error": ?\{', ran.stdout), ran.stdout


def test_the_readmes_response_calls_back(running: Running) -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    (source,) = re.findall(r"^```python\n([^`]*\"webhook\".*?)^```$", text, re.M | re.S)
    assert len(source.splitlines()) == 10, "ten lines, it says"
    port = free_port()
    listen = [*PENSTOCK, "webhooks", "listen", "--port", str(port)]
    with subprocess.Popen(listen, cwd=running.folder, stdout=-1, stderr=-1, text=True) as listening:
        try:
            assert "listening" in listening.stderr.readline()  # type: ignore[union-attr]
            ran = running.run("python", source.replace("9000", str(port)))
            response_id, status = ran.stdout.split()
            assert (ran.returncode, status) == (0, "queued")
            told = listening.stdout.readline()  # type: ignore[union-attr]
            assert re.match(rf"response\.\w+  {response_id}  evt_\w+  verified\n", told), told
        finally:
            listening.kill()


def test_the_python_of_the_page_on_tasks_runs(running: Running) -> None:
    source = "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "tasks.md").read_text(), re.M | re.S))
    ran = running.run("python", source.replace("ws://127.0.0.1:8000", running.url.replace("http", "ws")))
    assert ran.returncode == 0, ran.stderr
    # The text; the line of the list; the retried task's stream, of the same seed.
    found = re.fullmatch(r"(.*)\n\S{36} default \d{13} \{'prompt_tokens': \d+,.*?\}\n(.*)", ran.stdout, re.DOTALL)
    assert found, ran.stdout
    assert found[1] == found[2] != ""


def test_every_section_has_every_language() -> None:
    assert [(one.values[0], one.values[1]) for one in EXAMPLES] == [
        (section, language) for section in SAYS for language in LANGUAGES
    ]
