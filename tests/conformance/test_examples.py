"""Every example of docs/use/examples.md runs as it is written, and says what it should."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.conformance.conftest import System, gateway, sweeping
from tests.conformance.examples import LANGUAGES, Running, examples_of
from tests.processes import free_port
from tests.waiting import until
from tests.warm import Forked
from tests.webhooks_process import WebhooksProcess
from workers.processes import PENSTOCK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "use" / "examples.md").read_text("utf-8")
EXAMPLES = examples_of(PAGE)
#: What an example of each section prints, whatever its language.
SAYS = {
    "Submit and poll": r"completed|queued|in_progress",
    "Stream": r"\S",
    "Background response": r"complete",
    "Webhook": r"whsec_|response\.(completed|incomplete)",
    "Batch": r'"custom_id": ?"a".*"status_code": ?200',
}


@pytest.fixture(scope="module")
def running(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder, allowed = tmp_path_factory.mktemp("examples"), ("127.0.0.0/8",)
    own = gateway(system.store_url, files_dir=system.files_dir, webhook_allow=allowed)
    with own as (url, _), sweeping(system.store_url, system.files_dir, folder), WebhooksProcess(system.store_url):
        yield Running(folder, url, {"BROKER_URL": system.store_url})
        for one in httpx.get(f"{url}/v1/webhook_endpoints").json()["data"]:
            httpx.delete(f"{url}/v1/webhook_endpoints/{one['id']}").raise_for_status()


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
    log = running.folder / "listening.log"
    listening = Forked([*PENSTOCK, "webhooks", "listen", "--port", str(port)], running.env, log)
    try:
        until(lambda: log.exists() and "listening" in log.read_text())
        ran = running.run("python", source.replace("9000", str(port)))
        response_id, status = ran.stdout.split()
        assert (ran.returncode, status) == (0, "queued")
        told = rf"^response\.\w+  {response_id}  evt_\w+  verified\n"
        until(lambda: re.search(told, log.read_text(), re.M))
    finally:
        listening.kill()


def test_the_python_of_the_page_on_tasks_runs(running: Running) -> None:
    source = "\n".join(
        re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "use" / "tasks.md").read_text(), re.M | re.S)
    )
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
