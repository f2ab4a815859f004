"""`penstock quantize`, as a person runs it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from engine.text import ModelCard
from tests.engine.gguf_files import write_gguf
from tests.engine.random_models import write_model
from tests.exhaustive import few
from tests.workers.cli.conftest import invoke
from workers.cli.exits import Failure
from workers.errors import Refused
from workers.library import verify

TEXT = Path(__file__).read_text(encoding="utf-8") * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model(tmp_path_factory.mktemp("models") / "small")
    (made.parent / "text.py").write_text(TEXT, encoding="utf-8")
    return made


def quantize(*arguments: str | Path) -> str:
    """What it prints. Raises Failure."""
    result = invoke("quantize", *map(str, arguments))
    if isinstance(result.exception, Failure):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("bits", few(["8", "4"], "4"))
def test_a_folder_is_made_that_is_whole_and_says_what_changed(folder: Path, tmp_path: Path, bits: str) -> None:
    out = tmp_path / "new" / "out"
    said = quantize(folder, out, "--bits", bits, "--calibration", folder.parent / "text.py", "--threads", "1", "--json")
    report = json.loads(said)
    assert report["bits"] == int(bits)
    assert report["group_size"] == (None if bits == "8" else 32)
    assert report["bytes"] < report["of"]["bytes"]
    assert 0 < report["divergence"] < (0.01 if bits == "8" else 0.5)
    assert abs(report["perplexity"] / report["perplexity_before"] - 1 - report["perplexity_increase"]) < 1e-9
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert json.loads((out / "quantization_report.json").read_text()).items() <= report.items()
    verify(out)
    (out / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(Refused, match="damaged"):
        verify(out)


def test_a_gguf_file_becomes_a_folder(folder: Path, tmp_path: Path) -> None:
    file = write_gguf(folder, tmp_path / "small.gguf", "Q8_0")
    told = [
        "--bits",
        "8",
        "--method",
        "nearest",
        "--calibration",
        folder.parent / "text.py",
        "--threads",
        "1",
        "--json",
    ]
    report = json.loads(quantize(file, tmp_path / "out", *told))
    assert report["of"]["name"] == "small"
    assert report["of"]["bytes"] == file.stat().st_size
    assert 0 < report["divergence"] < 0.01
    card, original = ModelCard.from_folder(tmp_path / "out"), ModelCard.from_folder(file)
    assert (card.parameters, card.eos_token_ids) == (original.parameters, original.eos_token_ids)


FIELDS = "---\nlicense: apache-2.0\n---\n"


@pytest.mark.parametrize("before", [None, "# small\n", FIELDS, FIELDS + "\n# small\n", "---\nno end\n"])
def test_what_a_person_reads_begins_with_what_it_is(
    folder: Path, tmp_path: Path, before: str | None, progress_texts: list[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    if before is not None:
        (model / "README.md").write_text(before)
    quantize(model, tmp_path / "out", "--method", "nearest", "--calibration", folder.parent / "text.py")
    assert re.fullmatch(r"layer (\d+) of \1 is done", progress_texts[-2])
    assert progress_texts[-1] == "comparing the outputs of both models"
    said = (tmp_path / "out/README.md").read_text()
    fields = FIELDS if before and before.startswith(FIELDS) else ""
    assert said.startswith(f"{fields}\nQuantised by" if fields else "Quantised by")
    assert "| weights | 8 bits, one scale for each output, nearest |\n" in said
    rest = (before or "")[len(fields) :].lstrip("\n")
    assert said.endswith(f" |\n\n{rest}" if rest else " |\n")
    assert ("describes the original model" in said) == bool(rest)
    verify(tmp_path / "out")


def test_the_card_counts_the_numbers_that_weights_stand_for(folder: Path, tmp_path: Path) -> None:
    given = ("--bits", "4", "--head-bits", "8", "--method", "nearest", "--calibration", folder.parent / "text.py")
    table = quantize(folder, tmp_path / "out", *given, "--down-bits", "8")
    assert re.search(r"^down projections +8 bits$", table, re.MULTILINE)
    assert ModelCard.from_folder(tmp_path / "out").parameters == ModelCard.from_folder(folder).parameters
    shown = invoke("models", "show", str(tmp_path / "out"))
    assert "4 bits" in shown.stdout
    answer = invoke("run", str(tmp_path / "out"), "def f", "--max-tokens", "4", "--threads", "1")
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bits", "3"), "--bits is 3; it must be 8 or 4"),
        (("--head-bits", "4"), r"--head-bits is 4; it must be 16 \(unchanged\) or 8"),
        (("--down-bits", "5"), "--down-bits is 5; it must be 4 or 8"),
        (("--down-bits", "4"), "--down-bits 4 with --bits 8"),
        (("--method", "awq"), "--method is 'awq'; it must be one of gptq, nearest"),
        (("--group-size", "48"), "--group-size is 48; it must be one of 128, 64, 32"),
        (("--bits", "4", "--group-size", "128"), "a group of 128 does not divide"),
        (("--calibration", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--calibration", "EMPTY"), "is too short"),
        (("--device", "tpu"), "--device is 'tpu'; it must be one of"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    given = [str(tmp_path / "empty.txt") if one == "EMPTY" else one for one in arguments]
    text = [] if "--calibration" in given else ["--calibration", str(folder.parent / "text.py")]
    with pytest.raises(Failure, match=message):
        quantize(folder, tmp_path / "out", *given, *text)
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_it_takes_as_many_threads_as_a_container_may(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.execution.threads._limit", lambda: 1.5)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        quantize(folder, tmp_path / "out", "--method", "nearest", "--calibration", folder.parent / "text.py")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_what_is_there_is_not_overwritten(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(Failure, match="exists already"):
        quantize(folder, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_an_encoder_gets_eight_bits_and_keeps_its_modules(tmp_path: Path) -> None:
    """Its vectors stay close, also where the checkpoint stores matrices as one; what it cannot have is refused."""
    from engine import PoolingEngine
    from engine.text.pooling import read_pooling
    from tests.engine.sentence_folders import TEXTS, write_encoder_with_tokenizer

    pytest.importorskip("transformers")
    folder, out, text = tmp_path / "model", tmp_path / "out", tmp_path / "text"
    text.write_text(TEXT, encoding="utf-8")
    write_encoder_with_tokenizer(folder, "modernbert", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    report = json.loads(quantize(folder, out, "--calibration", text, "--threads", "1", "--json"))
    assert (report["bits"], report["method"], report["group_size"]) == (8, "nearest", 64)
    assert 0.999 < report["cosine_least"] <= report["cosine"] < 1
    verify(out)
    assert read_pooling(out).modes == ("cls",)
    with PoolingEngine.load(folder) as exact, PoolingEngine.load(out) as rounded:
        pairs = zip(exact.embed(TEXTS[:3]), rounded.embed(TEXTS[:3]), strict=True)
        cosines = [float(one @ other / (one @ one * (other @ other)) ** 0.5) for one, other in pairs]
    assert all(0.995 < cosine < 0.9999999 for cosine in cosines)
    for options in (["--bits", "4"], ["--method", "gptq"], ["--head-bits", "8"]):
        with pytest.raises(Failure, match=f"{options[0]}: model is an encoder"):
            quantize(folder, tmp_path / "none", "--calibration", text, *options)
    with pytest.raises(Failure, match="quantised already"):
        quantize(out, tmp_path / "none", "--calibration", text)
