"""`penstock watermark`: keys are made, and texts judged by them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.workers.cli.conftest import Run


def test_a_key_is_made_marks_a_text_and_finds_it(run: Run, tmp_path: Path) -> None:
    file, text = tmp_path / "keys.toml", tmp_path / "text"
    for name in ("news", "other"):
        assert run("watermark", "key", name, "--keys", str(file)).out == f"{name} is in {file}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    again = run("watermark", "key", "news", "--keys", str(file))
    assert (again.status, f"{file} has a key news" in again.err) == (2, True)
    # With secrets that are always the same: by some, the model repeats itself soon, and repetitions count once.
    secrets = iter(("a secret of the news", "another one's secret"))
    known = re.sub('secret = ".*"', lambda _: f'secret = "{next(secrets)}"', file.read_text())
    file.write_text(known.replace("delta = 2.0", "delta = 9.0"))
    options = (
        "--max-tokens",
        "120",
        "--ignore-eos",
        "--seed",
        "3",
        "--raw",
        "--threads",
        "1",
        "--watermark-keys",
        str(file),
    )
    text.write_text(run("run", "tiny", "def main():", "--watermark", "news", *options).out)
    judging = ("watermark", "detect", str(text), "--keys", str(file), "--model", "tiny")
    marked = run(*judging, "--key", "news", "--json")
    found = json.loads(marked.out)
    assert (marked.status, found["marked"], found["p"] < 1e-4 < found["judged"]) == (0, True, True)
    plain = run(*judging, "--key", "other")
    assert (plain.status, plain.out.startswith("not marked: ")) == (1, True)
    unknown = run(*judging, "--key", "x")
    assert (unknown.status, "has no key x; it has news, other" in unknown.err) == (2, True)
    refused = run("run", "tiny", "x", "--watermark", "x", *options)
    assert (refused.status, "--watermark='x'" in refused.err) == (2, True)


def test_what_cannot_be_judged_is_refused(run: Run, tmp_path: Path) -> None:
    file, text = tmp_path / "keys.toml", tmp_path / "text"
    file.write_text(run("watermark", "key", "news").out)
    text.write_bytes(b"\xff")
    judging = ("--keys", str(file), "--key", "news", "--model", "tiny")
    assert "is not UTF-8" in run("watermark", "detect", str(text), *judging).err
    assert run("watermark", "detect", str(tmp_path / "none"), *judging).status == 2
    for name in ("false", "a b", "x" * 65):
        assert run("watermark", "key", name).status == 2
