"""What may be written for a model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from workers.errors import Refused
from workers.library import LocalModels, ResolvedModel, find_model, name_of
from workers.library.reference import BUNDLED, PACKAGED, available

TINY = BUNDLED / "tiny"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)


def test_a_bundled_model_goes_by_its_name() -> None:
    found = find_model("tiny")
    assert (found.name, found.folder) == ("tiny", TINY)


def test_a_folder_is_called_as_it_is_named_wherever_it_is_looked_at_from(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "mine" / "inner", dirs_exist_ok=True)
    for reference in ("mine/inner", str(tmp_path / "mine" / "inner"), "mine/../mine/inner/"):
        assert find_model(reference).name == name_of(reference) == "inner"


def test_a_pulled_model_goes_by_its_name() -> None:
    pulled = LocalModels.default().copy("python", TINY)
    assert find_model("python") == ResolvedModel("python", pulled.folder)
    assert list(available())[-1] == "python"


def test_a_bundled_model_is_not_replaced_by_a_pulled_one() -> None:
    LocalModels.default().copy("tiny", TINY)
    assert find_model("tiny").folder == TINY


def test_a_model_may_be_given_another_name(tmp_path: Path) -> None:
    found = find_model(f"other={TINY}")
    assert (found.name, found.folder) == ("other", TINY)
    assert find_model("x.1=tiny").name == name_of("x.1=tiny") == "x.1"


def test_a_reference_for_another_process_means_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(TINY, tmp_path / "mine")
    found = find_model("other=mine")
    monkeypatch.chdir("/")
    again = find_model(found.reference)
    assert (again.name, again.folder) == ("other", tmp_path / "mine")


def test_a_folder_may_have_an_equals_sign(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "lr=0.1")
    with pytest.raises(Refused, match=r"cannot be part of a queue's name: write NAME=lr=0\.1"):
        find_model("lr=0.1")
    assert find_model("good=lr=0.1").folder == tmp_path / "lr=0.1"


@pytest.mark.parametrize("name", ["a b", "a/b", "a@b", ""])
def test_a_name_that_is_none_is_said_to_be_it(name: str) -> None:
    with pytest.raises(Refused, match=f"'{name}' cannot be a model's name: use letters"):
        find_model(f"{name}=tiny")


@pytest.mark.parametrize("reference", ["nowhere", "nowhere/at/all", "", "x=", "/", "tests", "\0", "x" * 5000])
def test_what_is_no_model_is_refused_with_what_there_is(reference: str) -> None:
    with pytest.raises(Refused, match=r"no model .*hf://OWNER/NAME, s3://BUCKET/NAME, or one of: tiny"):
        find_model(reference)


@pytest.mark.parametrize(
    ("reference", "name"), [("hf://a/b", "b"), ("hf://a/b@v1", "b"), ("n=hf://a/b", "n"), ("tiny", "tiny")]
)
def test_a_name_is_known_without_a_look(reference: str, name: str) -> None:
    assert name_of(reference) == name


def test_a_gguf_file_is_a_model_with_the_files_name(tmp_path: Path) -> None:
    folder = tmp_path / "smol"
    folder.mkdir()
    file = folder / "smol-q8.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0")
    for reference, name, model in (
        (str(folder), "smol", folder),
        (str(file), "smol-q8", file),
        (f"other={file}", "other", file),
        ("smol/smol-q8.gguf", "smol-q8", file),
    ):
        assert find_model(reference) == ResolvedModel(name, model)
        assert name_of(reference) == name
    (folder / "more.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(Refused, match="several models: more, smol-q8; give one of their files"):
        find_model(str(folder))
    for path in (file, folder / "more.gguf"):
        path.write_bytes(b"else")
    with pytest.raises(Refused, match="no model"):
        find_model(str(folder))


def test_a_part_of_a_gguf_file_is_the_whole_model(tmp_path: Path) -> None:
    parts = [tmp_path / f"big-0000{i}-of-00002.gguf" for i in (1, 2)]
    parts[1].write_bytes(b"GGUF")
    with pytest.raises(Refused, match=r"big-00001-of-00002\.gguf is missing"):
        find_model(str(parts[1]))
    parts[0].write_bytes(b"GGUF")
    assert find_model(str(parts[1])) == ResolvedModel("big", parts[0])


class TestPackaged:
    """`smollm2`, in a package that is no more than its file."""

    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        folder = tmp_path / "site" / "carries_smollm2"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
        monkeypatch.syspath_prepend(str(folder.parent))
        monkeypatch.setitem(PACKAGED, "smollm2", replace(PACKAGED["smollm2"], module=folder.name))
        file = folder / PACKAGED["smollm2"].file
        file.write_bytes(b"GGUF\x03\0\0\0")
        return file

    def test_is_found_in_its_package_without_its_import(self, file: Path) -> None:
        assert find_model("smollm2") == ResolvedModel("smollm2", file)
        assert find_model("chat=smollm2") == ResolvedModel("chat", file)
        assert name_of("smollm2") == "smollm2"
        assert available()["smollm2"] == file

    def test_gives_way_to_a_pulled_model_and_to_a_folder_of_its_name(self, file: Path, tmp_path: Path) -> None:
        pulled = LocalModels.default().copy("smollm2", TINY)
        assert find_model("smollm2").folder == pulled.folder
        shutil.copytree(TINY, tmp_path / "smollm2")
        assert find_model("smollm2").folder == tmp_path / "smollm2"
