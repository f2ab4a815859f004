"""The local model folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from engine.text import ModelCard
from engine.text.checkpoint import model_version
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import write_model
from tests.waiting import PATIENCE_S
from workers.errors import Refused
from workers.library import LocalModels
from workers.library.local_models import Source, needed, sha256_of

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"


@pytest.fixture
def models(tmp_path: Path) -> LocalModels:
    return LocalModels(tmp_path / "models")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model folder of the user's own, with things in it that are no part of the model."""
    folder = tmp_path / "own"
    shutil.copytree(TINY, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "optimizer.pt").write_text("mine")
    (folder / "run").mkdir()
    return folder


def put(models: LocalModels, name: str, text: str, source: Source | None = None) -> Path:
    """A version that is no model, which the models does not mind."""
    with models.workplace(name, text) as place:
        (place / "config.json").write_text(text)
        return models.finish(place, {"config.json": sha256_of(place / "config.json")}, source).folder


class TestCopy:
    def test_has_the_models_files_and_no_others(self, models: LocalModels, own: Path) -> None:
        pulled = models.copy("mine", own)
        names = {path.name for path in pulled.folder.iterdir()}
        assert names == {path.name for path in TINY.iterdir()} | {"manifest.json"}
        assert ModelCard.from_folder(pulled.folder, "mine").version == pulled.version == pulled.folder.name

    def test_of_a_gguf_file_has_its_parts_alone(self, models: LocalModels, tmp_path: Path) -> None:
        file = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf")
        pulled = models.copy("mine", file)
        assert {path.name for path in pulled.folder.iterdir()} == {"a.gguf", "manifest.json"}
        assert ModelCard.from_folder(pulled.folder, "mine").version == pulled.version
        (tmp_path / "a.gguf").write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(Refused, match=r"a\.gguf is truncated"):
            models.copy("mine", file)

    def test_of_the_same_files_is_the_same_version_and_does_not_change_with_them(
        self, models: LocalModels, own: Path
    ) -> None:
        first = models.copy("mine", own)
        assert models.copy("mine", own).folder == first.folder
        assert models.copy("other", own).version == first.version
        assert [one.name for one in models.all()] == ["other", "mine"]
        with (own / "model.safetensors").open("r+b") as file:
            file.write(b"changed")
        assert sha256_of(first.folder / "model.safetensors") == sha256_of(TINY / "model.safetensors")

    def test_that_is_not_what_its_manifest_says_is_refused(self, models: LocalModels, own: Path) -> None:
        pulled = models.copy("mine", own)
        with (pulled.folder / "model.safetensors").open("r+b") as file:
            file.write(b"changed")
        with pytest.raises(Refused, match=r"model\.safetensors is damaged"):
            models.copy("again", pulled.folder)
        (pulled.folder / "manifest.json").write_text("[]")
        with pytest.raises(Refused, match=r"manifest\.json cannot be read"):
            models.copy("again", pulled.folder)

    def test_whose_weights_were_cut_off_is_refused(self, models: LocalModels, own: Path) -> None:
        weights = own / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        (own / "manifest.json").unlink(missing_ok=True)
        with pytest.raises(Refused, match="is truncated"):
            models.copy("mine", own)

    def test_that_fails_leaves_nothing(self, models: LocalModels, own: Path) -> None:
        (own / "config.json").unlink()
        with pytest.raises(Refused, match=r"has no config\.json"):
            models.copy("mine", own)
        models.root.write_text("not a folder")
        with pytest.raises(Refused, match="cannot write into"):
            models.copy("mine", TINY)


class TestVersions:
    def test_the_last_pulled_is_the_one_that_is_meant(self, models: LocalModels) -> None:
        first, second = put(models, "m", "1"), put(models, "m", "2")
        assert models.all()[0] == models.find("m")
        assert models.all()[0].folder == second
        assert put(models, "m", "1") == first == models.all()[0].folder

    def test_say_where_they_came_from_and_do_not_depend_on_it(self, models: LocalModels) -> None:
        source = Source("a/b", "main", "c0ffee")
        folder = put(models, "m", "1", source)
        assert put(models, "plain", "1").name == folder.name == model_version(folder)
        assert {one.name: one.source for one in models.all()} == {"m": source, "plain": None}

    def test_that_are_not_whole_are_not_there(self, models: LocalModels) -> None:
        assert (models.all(), models.find("m")) == ([], None), "there is no folder"
        with models.workplace("m", "key") as place:
            (place / "manifest.json").write_text(json.dumps({"v": 1, "files": {}}))
        (models.root / "m" / "0123456789ab").mkdir()
        assert models.all() == []

    def test_take_in_nothing_from_outside_of_a_folder(self, models: LocalModels, own: Path, tmp_path: Path) -> None:
        secret = tmp_path / "secret.json"
        secret.write_text('{"key": "value"}')
        (own / "tokenizer_config.json").unlink()
        (own / "tokenizer_config.json").symlink_to(secret)
        with pytest.raises(Refused, match=r"outside of the model's folder.*cp -rL"):
            models.copy("m", own)
        assert models.all() == []

    @pytest.mark.parametrize("target", ["pipe", "/dev/zero"])
    def test_do_not_wait_for_a_manifest_that_never_ends(self, models: LocalModels, own: Path, target: str) -> None:
        os.mkfifo(own / "pipe")
        (own / "manifest.json").symlink_to(target)
        with pytest.raises(Refused, match=r"manifest\.json is not a regular file"):
            models.copy("m", own)
        assert models.all() == []


def test_a_workplace_is_for_one_at_a_time_and_keeps_what_is_in_it(models: LocalModels) -> None:
    waits, order = threading.Event(), []

    def second() -> None:
        with models.workplace("m", "key", waits.set) as place:
            order.append(f"second found {(place / 'half').read_text()}")

    with models.workplace("m", "key") as place:
        (place / "half").write_text("half")
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(PATIENCE_S)
        order.append("first")
    thread.join(PATIENCE_S)
    assert order == ["first", "second found half"]


def test_the_default_folder_is_the_users_or_the_one_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", "~/m")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LocalModels.default().root == tmp_path / "m"
    monkeypatch.delenv("PENSTOCK_MODELS")
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert LocalModels.default().root == tmp_path / ".local/share/penstock/models"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert LocalModels.default().root == tmp_path / "data/penstock/models"


def test_a_models_files_are_weights_settings_and_words() -> None:
    kept = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors", "README.md", "LICENSE.txt"}
    others = {"manifest.json", "x.bin", "train.py", ".gitattributes", "a b.json", "other.safetensors", "logo.png"}
    assert set(needed("m", kept | others, None)) == kept
