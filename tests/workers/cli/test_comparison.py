"""`penstock models diff` and `compare`, as a person runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from redis import Redis

from engine.text import ModelCard
from producers import Client
from producers.contract import keys
from producers.store.fleet import cards
from tests.engine.random_models import write_model
from tests.workers.cli.conftest import Run
from workers.cli import comparison
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

    def test_the_last_tasks_of_a_system_are_replayed(self, run: Run, valkey_url: str, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "small")
        card = json.loads(ModelCard.from_folder(folder).to_json())
        with Redis.from_url(valkey_url) as store, Client(valkey_url) as client:
            cards.publish(store, {**card, "name": "small"}, {})
            for number in range(3):
                client.submit(model="small", prompt=[5, 6, 7 + number], tenant="ab"[number % 2], task_id=f"t{number}")
            store.hset(keys.task("t2"), "encoding", "of another tokenizer")
            client.submit(model="small", prompt="import os")
        argv = ("models", "compare", str(folder), str(folder), "--threads", "1", "--json", "--broker", valkey_url)
        for more, count in (((), 3), (("--tenant", "b"), 1)):
            ran = run(*argv, "--replay", "10", *more, "--max-divergence", "0")
            assert (ran.status, json.loads(ran.out)["prompts"]) == (0, count), ran.err
            assert ("1 tasks are passed over" in ran.err) == (not more)
        report = json.loads(run(*argv, "--replay", "2", "--price", "3.6").out)
        assert report["prompts"] == 2
        assert report["cost_per_million_tokens"] == pytest.approx(
            [1000 / speed for speed in report["tokens_per_second"]]
        )
        ran = run(*argv, "--replay", "2", "--tenant", "c")
        assert ran.status == 2
        assert "keeps no prompt of a task of small of c" in " ".join(ran.err.split())

    def test_an_evaluation_of_the_users_decides_too(self, run: Run, tmp_path: Path) -> None:
        argv = ("models", "compare", "tiny", "tiny-v2", "--json", "--evaluate")
        score = 'echo "of $PENSTOCK_MODEL"; grep -c 384 "$PENSTOCK_FOLDER/config.json" || true'
        ran = run(*argv, score)
        assert (ran.status, json.loads(ran.out)["scores"]) == (0, [[0, 1.0], [0, 0.0]])
        ran = run(*argv, score, "--max-score-drop", "0.5")
        assert (ran.status, json.loads(ran.out)["failed"]) == (1, ["the score is 0, and A's 1: the most is 0.5"])
        assert run(*argv, score, "--max-score-drop", "1").status == 0
        ran = run(*argv, 'test "$PENSTOCK_MODEL" = tiny || exit 3')
        assert (ran.status, json.loads(ran.out)["failed"]) == (1, ["the evaluation of B ended with status 3"])
        ran = run(*argv, "echo good", "--max-score-drop", "1")
        assert ran.status == 2
        assert "compares the numbers in the last lines" in " ".join(ran.err.split())

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ((), "nothing to compare by"),
            (("--replay", "5", "--prompts", "x"), "leave one out"),
            (("--evaluate", "true", "--tenant", "a"), "--tenant is for --replay"),
            (("--evaluate", "true", "--min-same", "1"), "and no prompts"),
            (("--evaluate", "true", "--price", "1"), "and no prompts"),
        ],
    )
    def test_options_that_do_not_go_together_are_refused(self, run: Run, argv: tuple[str, ...], message: str) -> None:
        ran = run("models", "compare", "tiny", "tiny", *argv)
        assert ran.status == 2
        assert message in " ".join(ran.err.split())

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

    def test_only_line_breaks_end_a_prompt_and_a_file_that_is_too_large_is_cut_between_prompts(
        self, prompts: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts.write_bytes('{"prompt": "a\u2028b"}\r\nc\x0cd\r\néé'.encode())
        assert comparison._prompts(prompts) == ["a\u2028b", "c\x0cd", "éé"]
        monkeypatch.setattr(comparison, "MAX_PROMPTS_BYTES", len(prompts.read_bytes()) - 1)
        assert comparison._prompts(prompts) == ["a\u2028b", "c\x0cd"]

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
