"""`penstock adapters`: what operators add to a store, list and remove."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from redis import Redis

from engine.text.adapter import read_adapter
from producers.contract import keys
from producers.store.fleet import cards
from tests.engine.adapters.folders import write_adapter
from tests.workers.cli.conftest import Run
from tests.workers.library.hub_server import Hub, Repo, running_hub
from workers.library import find_model
from workers.library.reference import described


def test_an_adapter_is_added_listed_and_removed(operate: Run, valkey: Redis, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    version = read_adapter(folder).version
    refused = operate("adapters", "add", f"mine={folder}", "--base", "tiny")
    assert (refused.status, refused.out) == (2, "")
    assert 'There is no model "tiny" in this store' in refused.err
    cards.publish(valkey, *described(find_model("tiny")))
    assert operate("adapters", "ls").out == "There are no adapters.\n"
    assert operate("adapters", "add", f"mine={folder}", "--base", "tiny").out == f"tiny:mine {version}\n"
    (listed,) = json.loads(operate("adapters", "ls", "--json").out)
    assert listed == {
        "name": "mine",
        "base": "tiny",
        "version": version,
        "rank": 2,
        "added": listed["added"],
        "size": sum(path.stat().st_size for path in folder.iterdir()),
    }
    assert operate("adapters", "ls").out.splitlines()[1].split()[:4] == ["mine", "tiny", version, "2"]
    assert operate("adapters", "rm", "mine").out == f"tiny:mine {version} removed\n"
    assert not valkey.exists(keys.ADAPTERS, keys.adapter(version))
    assert "There is no adapter" in operate("adapters", "rm", "mine").err


def test_a_folder_that_is_no_adapter_is_refused_before_the_store_is_asked(operate: Run, tmp_path: Path) -> None:
    assert "mine is not NAME=PATH" in operate("adapters", "add", "mine", "--base", "tiny").err
    refused = operate("adapters", "add", f"mine={tmp_path}", "--base", "tiny")
    assert (refused.status, refused.out) == (2, "")
    assert "has no adapter_config.json" in refused.err


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With an adapter, and what is none."""
    folder = write_adapter(tmp_path / "on-hub")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = {"adapter_model.safetensors"}
    pickled = {"adapter_config.json": b"{}", "adapter_model.bin": b"no"}
    huge = Repo(dict(files), weights, sizes=dict.fromkeys(weights, 257 << 20))
    repos = {"a/one": Repo(files | {"train.py": b"no"}, weights), "a/old": Repo(pickled), "a/huge": huge}
    dora = json.dumps(json.loads(files["adapter_config.json"]) | {"use_dora": True}).encode()
    repos["a/dora"] = Repo(files | {"adapter_config.json": dora}, weights)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "models"))
    with running_hub(Hub(repos)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_one_is_added_from_a_hub(operate: Run, valkey: Redis, hub: Hub, tmp_path: Path) -> None:
    assert "There is no model" in operate("adapters", "add", "mine=hf://a/one", "--base", "tiny").err
    assert hub.asked == []
    cards.publish(valkey, *described(find_model("tiny")))
    version = read_adapter(tmp_path / "on-hub").version
    added = operate("adapters", "add", "mine=hf://a/one@v1", "--base", "tiny")
    assert (added.out, "at commit c0ffee" in added.err) == (f"tiny:mine {version}\n", True)
    assert set(hub.fetched()) == {"adapter_config.json", "adapter_model.safetensors"}
    assert valkey.exists(keys.adapter(version))
    assert not list((tmp_path / "models").rglob("*.safetensors")), "what the store has is not kept twice"
    for reference, said in (
        ("a/none", "has no model 'a/none'"),
        ("a/one@v9", "no branch, tag or commit 'v9'"),
        ("a/one/x.gguf", "an adapter is a repository: hf://OWNER/NAME"),
        ("a/old", "no adapter_model.safetensors: .*adapter_model.bin can run code"),
        ("a/huge", "at most 268435456 of an adapter"),
        ("a/dora", "hf://a/dora/adapter_config.json: use_dora=True is not supported"),
    ):
        refused = operate("adapters", "add", f"other=hf://{reference}", "--base", "tiny")
        assert refused.status == 2
        assert re.search(said, refused.err), refused.err
    hub.wrong = {"adapter_model.safetensors": b"x" * len(hub.repos["a/one"].files["adapter_model.safetensors"])}
    assert "came damaged" in operate("adapters", "add", "other=hf://a/one", "--base", "tiny").err
    few = operate(
        "adapters", "add", f"other={write_adapter(tmp_path / 'b', alpha=1)}", "--base", "tiny", "--total-bytes", "9"
    )
    assert "all adapters of this store may take 9" in few.err
