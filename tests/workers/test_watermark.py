"""Watermarks through the system: keys by name in every API, refused at the edge, their secrets nowhere in the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import Engine, EngineConfig, SamplingParams
from producers import Client
from tests.producers.gateway.conftest import Door, open_door
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from tests.workers.rig import rig as opened_rig
from workers.library.reference import BUNDLED

__all__ = ["open_door"]

TINY = BUNDLED / "tiny"
PROMPT = "def main():"
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
SECRETS = {"news": "the-secret-of-news", "usual": "the-secret-of-usual"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("watermark") / "keys.toml"
    file.write_text("".join(f"[{name}]\nsecret = '{secret}'\ndelta = 6.0\n" for name, secret in SECRETS.items()))
    return file


@pytest.fixture(scope="module")
def expected(keys: Path) -> dict[str, str]:
    """The engine's own outputs, by watermark."""
    with Engine.load(TINY, EngineConfig(threads=1, watermark_keys=str(keys))) as engine:
        names = ["news", "usual", "false"]
        outputs = engine.generate([PROMPT] * 3, [SamplingParams(**GREEDY, watermark=name) for name in names])
    return {name: output.text for name, output in zip(names, outputs, strict=True)}


@pytest.fixture(scope="module")
def system(keys: Path) -> Iterator[Rig]:
    with opened_rig() as made:
        made.worker(
            model="tiny",
            engine_factory="workers.runtime.worker:load_engine",
            engine={"threads": 1, "watermark_keys": str(keys), "watermark_default": "usual"},
        )
        yield made


@pytest.fixture
def door(system: Rig, open_door: Callable[..., Door]) -> Door:
    return open_door(broker=system.url, store=system.store_url)


def test_each_api_takes_a_name_and_no_secret_reaches_the_store(
    door: Door, system: Rig, expected: dict[str, str]
) -> None:
    def completed(**fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": PROMPT, **GREEDY, **fields}
        return httpx.post(f"{door.url}/v1/completions", json=body, timeout=PATIENCE_S)

    assert len({*expected.values()}) == 3
    assert completed(watermark="news").json()["choices"][0]["text"] == expected["news"]
    assert completed().json()["choices"][0]["text"] == expected["usual"]
    for watermark, said in (("x", "the model's watermark keys are news, usual"), (False, "turn that off"), (7, "name")):
        refused = completed(watermark=watermark)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "watermark")
        assert said in refused.json()["error"]["message"]
    with Client(system.url) as client:
        task = client.submit(model="tiny", prompt=PROMPT, **GREEDY, watermark="news")
        assert task.result(timeout=PATIENCE_S).text == expected["news"]
        assert '"watermark":"news"' in system.record(task.id)["task"]
        default = client.submit(model="tiny", prompt=PROMPT, **GREEDY)
        assert default.result(timeout=PATIENCE_S).text == expected["usual"]
        # A retry, or another worker, keeps it though the operator changes the default.
        assert '"watermark":"usual"' in system.record(default.id)["task"]
    stored = b"".join(dumped for key in system.store.scan_iter() if (dumped := system.store.dump(key)))
    assert b"news" in stored
    assert not [secret for secret in SECRETS.values() if secret.encode() in stored]
