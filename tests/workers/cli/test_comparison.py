"""`penstock models diff` and `compare`, as a person runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from engine.text import ModelCard
from tests.engine.random_models import write_model
from tests.workers.cli.conftest import Run
from workers.library import LocalModels, find_model
from workers.library.reference import BUNDLED

TINY = BUNDLED / "tiny"


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_MODELS", str(tmp_path / "models"))


class TestDiff:
    def test_files_settings_and_tensors_that_differ_are_shown(self, run: Run) -> None:
        shown = run("models", "diff", "tiny", "tiny-v2").out
        assert "intermediate_size  384  480" in shown
        assert "model.layers.0.mlp.up_proj.weight    BF16 [384, 192]  BF16 [480, 192]" in shown
        changes = json.loads(run("models", "diff", "tiny", "tiny-v2", "--json").out)
        assert set(changes["files"]) == {"README.md", "config.json", "model.safetensors"}
        assert changes["settings"] == {"intermediate_size": [384, 480]}
        assert [model["version"] for model in changes["models"]] == [
            ModelCard.from_folder(BUNDLED / name).version for name in ("tiny", "tiny-v2")
        ]

    def test_two_pulled_versions_of_one_model(self, run: Run) -> None:
        models = LocalModels.default()
        versions = [models.copy("python", BUNDLED / name).version for name in ("tiny", "tiny-v2")]
        first, second = (f"python@{version}" for version in versions)
        assert run("models", "diff", first, first).out.splitlines()[1:] == [
            "files: the same",
            "settings: the same",
            "tensors: the same",
        ]
        assert "intermediate_size  384  480" in run("models", "diff", first, second).out
        assert find_model(first).name == "python"
        ran = run("models", "diff", first, "python@0123")
        assert ran.status == 2
        assert f"has no version '0123' of python; it has {versions[1]}, {versions[0]}" in " ".join(ran.err.split())


class TestCompare:
    @pytest.fixture
    def prompts(self, tmp_path: Path) -> Path:
        file = tmp_path / "prompts.txt"
        file.write_text('def main():\n\n{"prompt": "class Reader:"}\nimport os\n')
        return file

    def test_two_versions_are_compared_and_bounds_decide_the_status(
        self, run: Run, prompts: Path, tmp_path: Path
    ) -> None:
        small = write_model(tmp_path / "small")
        other = write_model(tmp_path / "other", seed=2)
        argv = ("models", "compare", str(small), str(other), "--prompts", str(prompts), "--threads", "1", "--json")
        ran = run(*argv, "--max-divergence", "1e-9", "--min-agreement", "0", "--min-same", "1.5")
        report = json.loads(ran.out)
        assert (ran.status, report["prompts"]) == (1, 3)
        assert report["divergence"] > 0
        assert report["perplexity"] != report["perplexity_before"]
        assert [failed.split()[0] for failed in report["failed"]] == ["divergence", "same"]
        assert "and the bound 1e-09" in ran.err
        same = run(*argv[:3], str(small), *argv[4:], "--max-divergence", "0", "--max-perplexity-increase", "0")
        report = json.loads(same.out)
        assert (same.status, report["divergence"], report["agreement"], report["same"]) == (0, 0.0, 1.0, 1.0)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "has no prompt"),
            (b"x\n{nothing}\n", "line 2 of"),
            (b'{"prompt": 5}', "line 1 of"),
            (b"\xff", "cannot be read as UTF-8"),
        ],
    )
    def test_prompts_that_are_none_are_refused(self, run: Run, prompts: Path, content: bytes, message: str) -> None:
        prompts.write_bytes(content)
        ran = run("models", "compare", "tiny", "tiny", "--prompts", str(prompts))
        assert ran.status == 2
        assert message in " ".join(ran.err.split())

    def test_models_of_other_tokenizers_are_refused(self, run: Run, prompts: Path, tmp_path: Path) -> None:
        folder = tmp_path / "other"
        shutil.copytree(TINY, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["merges"] = []
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "manifest.json").unlink(missing_ok=True)
        ran = run("models", "compare", "tiny", str(folder), "--prompts", str(prompts))
        assert ran.status == 2
        assert "make different token ids of prompt 1" in " ".join(ran.err.split())
