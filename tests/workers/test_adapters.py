"""Adapters through the system: added to the store, loaded by the workers of their base, used by every API, removed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.text.adapter import read_adapter
from producers import AsyncClient
from producers.admin.explain import Explanation, explain
from producers.contract import keys
from producers.contract.record import Record
from producers.store.fleet import adapters
from tests.engine.adapters.folders import CONFIG, tensors, write_adapter
from tests.producers.gateway.conftest import Door, open_door
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from tests.workers.rig import rig as opened_rig
from workers.library.reference import BUNDLED

__all__ = ["open_door"]

TINY = BUNDLED / "tiny"
PROMPT = "def main():"
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


def adapter_of_tiny(folder: Path, seed: int = 0, **config: Any) -> Path:
    return write_adapter(folder, tensors(seed=seed, **_shape()), **config)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: adapter_of_tiny(root / name, seed) for seed, name in enumerate(("one", "two", "three"))}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    """The engine's own outputs, by adapter."""
    with Engine.load(TINY, EngineConfig(threads=1)) as engine:
        for name, folder in folders.items():
            engine.load_adapter(name, folder)
        params = SamplingParams(**GREEDY)
        return {name: engine.generate([PROMPT], params, name)[0].text for name in ("", *folders)}


@pytest.fixture(scope="module")
def system(folders: dict[str, Path]) -> Iterator[Rig]:
    """A worker with room for two of the adapters."""
    size = 4 * sum(value.numel() for value in tensors(**_shape()).values())
    with opened_rig() as made:
        made.worker(
            model="tiny",
            engine_factory="workers.runtime.worker:load_engine",
            engine={"threads": 1, "adapter_bytes": 2 * size + 8, "kv_cache_bytes": 1 << 22},
        )
        for name, folder in folders.items():
            add(made, name, folder)
        yield made


def _shape() -> dict[str, int]:
    settings = json.loads((TINY / "config.json").read_text())
    heads = settings["num_attention_heads"]
    shape = {name: settings[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return shape | {
        "num_attention_heads": heads,
        "head_dim": settings.get("head_dim", settings["hidden_size"] // heads),
    }


def add(made: Rig, name: str, folder: Path, base: str = "tiny") -> adapters.StoredAdapter:
    files = read_adapter(folder)
    return adapters.add(made.store, name, base, files.version, files.rank, folder)


@pytest.fixture
def door(system: Rig, open_door: Callable[..., Door]) -> Door:
    return open_door(broker=system.url, store=system.store_url)


def completed(door: Door, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, **GREEDY, **fields}
    return httpx.post(f"{door.url}/v1/completions", json=body, timeout=PATIENCE_S)


def test_an_adapter_answers_by_both_of_its_names_beside_its_base_and_others(
    door: Door, system: Rig, expected: dict[str, str]
) -> None:
    """There are more than the worker has room for: they take turns."""
    for _ in range(2):
        for name in ("one", "two", "three"):
            for model in (name, f"tiny:{name}"):
                assert completed(door, model).json()["choices"][0]["text"] == expected[name]
    assert completed(door, "tiny").json()["choices"][0]["text"] == expected[""]


def test_a_chat_and_a_task_take_its_name(door: Door) -> None:
    messages = [{"role": "user", "content": "x"}]
    chat = httpx.post(
        f"{door.url}/v1/chat/completions", json={"model": "one", "messages": messages, **GREEDY}, timeout=PATIENCE_S
    )
    assert chat.json()["choices"][0]["message"]["content"] is not None
    task = httpx.post(f"{door.url}/v1/tasks", json={"model": "tiny:one", "prompt": PROMPT, **GREEDY}).json()
    result = httpx.get(f"{door.url}/v1/tasks/{task['id']}?wait=60", timeout=PATIENCE_S).json()
    assert result["model"] == "one"


def test_models_list_it_with_its_parent(door: Door, folders: dict[str, Path]) -> None:
    listed = {model["id"]: model for model in httpx.get(f"{door.url}/v1/models").json()["data"]}
    assert listed.keys() >= {"tiny", "one", "two", "three"}
    assert listed["one"]["parent"] == "tiny"
    assert listed["one"]["adapter"] == {"version": read_adapter(folders["one"]).version, "rank": CONFIG["r"]}
    assert "parent" not in listed["tiny"]
    assert httpx.get(f"{door.url}/v1/models/tiny:two").json()["parent"] == "tiny"


def test_a_name_that_is_none_is_not_found(door: Door) -> None:
    for model in ("four", "tiny:four", "other:one", "tiny:", ":one:"):
        answer = completed(door, model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_its_version_may_be_asked_for_and_no_other(door: Door, folders: dict[str, Path], system: Rig) -> None:
    version = read_adapter(folders["one"]).version
    task = {"model": "one", "prompt": PROMPT, "adapter": version, **GREEDY}
    accepted = httpx.post(f"{door.url}/v1/tasks", json=task)
    assert accepted.status_code == 202
    assert system.record(accepted.json()["id"])["adapter"] == version
    for model, said in (("two", "has the adapter version"), ("tiny", "has no adapter")):
        refused = httpx.post(f"{door.url}/v1/tasks", json=task | {"model": model})
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]


def test_one_that_does_not_fit_fails_its_own_tasks_and_names_the_tensor(
    door: Door, system: Rig, tmp_path: Path, expected: dict[str, str]
) -> None:
    add(system, "wrong", write_adapter(tmp_path / "wrong", tensors(hidden_size=48, intermediate_size=64)))
    answer = completed(door, "wrong")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "adapter_broken")
    said = answer.json()["error"]["message"]
    version = read_adapter(tmp_path / "wrong").version
    assert (
        f"the adapter wrong (version {version}) cannot be served: adapter_model.safetensors: base_model.model." in said
    )
    assert "if its base was replaced after it was added, add one" in said
    assert "lora_A.weight has shape" in said
    assert completed(door, "one").json()["choices"][0]["text"] == expected["one"]


def test_tasks_that_wait_when_it_is_removed_fail(door: Door, system: Rig, tmp_path: Path) -> None:
    stored = add(system, "gone", adapter_of_tiny(tmp_path / "gone", 9))
    system.store.unlink(keys.adapter(stored.version))
    answer = completed(door, "gone")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")
    adapters.remove(system.store, "gone")
    system.until(lambda: completed(door, "gone").json()["error"]["code"] == "model_not_found")


@pytest.mark.parametrize(
    ("name", "base", "message"),
    [
        ("a/b", "tiny", '"a/b" is none'),
        (".hidden", "tiny", "is none"),
        ("x" * 101, "tiny", "is none"),
        ("mine", "small", 'There is no model "small" in this store'),
        ("tiny", "tiny", 'There is a model named "tiny"'),
        ("two", "tiny", 'There is an adapter named "two", of tiny; remove it first'),
    ],
)
def test_what_cannot_be_added_is_refused(
    system: Rig, folders: dict[str, Path], name: str, base: str, message: str
) -> None:
    with pytest.raises(adapters.AdapterRefused, match=message):
        add(system, name, folders["one"], base)


def test_the_same_may_be_added_again(system: Rig, folders: dict[str, Path]) -> None:
    assert add(system, "one", folders["one"]) == adapters.all_of(system.store)["one"]
    assert system.store.ttl(keys.adapter(read_adapter(folders["one"]).version)) == -1


def test_streams_of_more_adapters_than_there_is_room_for_all_end_right(
    door: Door, expected: dict[str, str], folders: dict[str, Path]
) -> None:
    """An adapter that a task runs with is not unloaded; the others wait for it."""
    with ThreadPoolExecutor(6) as threads:
        models = [*folders, *folders]
        answers = list(threads.map(lambda model: completed(door, model), models))
    for model, answer in zip(models, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == expected[model]


def test_a_task_whose_adapter_is_being_loaded_waits_and_others_do_not(rig: Rig, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    rig.worker(STUB_ADAPTERS=str(gate))
    version = add(rig, "mine", write_adapter(tmp_path / "mine"), "stub").version
    first, second = rig.submit(1, model="stub:mine") + rig.submit(1, model="mine")
    rig.until(lambda: "adapter_loading" in _reasons(rig, first))
    (explained,) = (reason for reason in _explained(rig, first).blocked_by if reason.name == "adapter_loading")
    assert f"loads its adapter, version {version}" in explained.message
    rig.check(rig.submit(3))
    rig.cancel(second)
    rig.until(lambda: rig.status(second) == "cancelled")
    gate.touch()
    rig.check([first])
    assert {attempt.why for attempt in _explained(rig, first).attempts} == {"adapter_loading", "ended"}
    rig.check_nothing_left()


def _explained(rig: Rig, task_id: str) -> Explanation:
    async def explained() -> Explanation:
        async with AsyncClient(rig.url, rig.store_url) as client:
            return await explain(client.store, client.broker, Record.parse(task_id, rig.record(task_id)))

    return asyncio.run(explained())


def _reasons(rig: Rig, task_id: str) -> list[str]:
    return [reason.name for reason in _explained(rig, task_id).blocked_by]
