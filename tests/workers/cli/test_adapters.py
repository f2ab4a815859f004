"""`penstock adapters`: what operators add to a store, list and remove."""

from __future__ import annotations

import json
from pathlib import Path

from redis import Redis

from engine.text.adapter import read_adapter
from producers.contract import keys
from producers.store.fleet import cards
from tests.engine.adapters.folders import write_adapter
from tests.workers.cli.conftest import Run
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
