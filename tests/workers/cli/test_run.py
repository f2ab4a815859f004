"""`penstock run`: the engine within the command."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.text import ChatTemplate
from tests.engine.adapters.folders import tensors, write_adapter
from tests.engine.gguf_files import write_gguf
from tests.workers.cli.conftest import Run
from workers.library.reference import BUNDLED

TINY = BUNDLED / "tiny"
GREEDY = ("--temperature", "0", "--threads", "1")


@pytest.fixture(scope="module")
def engine() -> Engine:
    with Engine.load(TINY, EngineConfig(threads=1, max_num_seqs=2)) as running:
        yield running


def test_prints_what_the_engine_makes_of_the_prompt(run: Run, engine: Engine) -> None:
    ran = run("run", "tiny", "def main():", "--raw", "--max-tokens", "12", *GREEDY)
    (expected,) = engine.generate(["def main():"], SamplingParams(max_tokens=12, temperature=0))
    assert ran.status == 0
    assert ran.err == "(cut: --max-tokens or the end of the model's context was reached)\n"
    assert ran.out == expected.text.removesuffix("\n") + "\n"


def test_a_gguf_file_is_a_model_as_a_folder_is(run: Run, tmp_path: Path) -> None:
    file = write_gguf(TINY, tmp_path / "tiny.gguf", "BF16")
    prompt = "def main():"
    told = json.loads(run("run", str(file), prompt, "--raw", "--max-tokens", "12", "--json", *GREEDY).out)
    expected = json.loads(run("run", "tiny", prompt, "--raw", "--max-tokens", "12", "--json", *GREEDY).out)
    assert told["choices"] == expected["choices"]
    assert told["usage"] == expected["usage"]


def test_an_adapter_is_applied_by_its_folder(run: Run, engine: Engine, tmp_path: Path) -> None:
    settings = json.loads((TINY / "config.json").read_text())
    shape = {name: settings[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = settings["num_attention_heads"]
    shape |= {"num_attention_heads": heads, "head_dim": settings.get("head_dim", settings["hidden_size"] // heads)}
    folder = write_adapter(tmp_path / "adapter", tensors(**shape))
    options = ("--raw", "--max-tokens", "12", "--json", *GREEDY)
    told = json.loads(run("run", "tiny", "def main():", "--adapter", f"mine={folder}", *options).out)
    engine.load_adapter("mine", folder)
    (expected,) = engine.generate(["def main():"], SamplingParams(max_tokens=12, temperature=0), "mine")
    assert told["choices"][0]["token_ids"] == expected.token_ids
    assert told["choices"] != json.loads(run("run", "tiny", "def main():", *options).out)["choices"]


def test_an_adapter_that_is_none_is_refused(run: Run, tmp_path: Path) -> None:
    assert "--adapter mine is not NAME=PATH" in run("run", "tiny", "x", "--adapter", "mine").err
    ran = run("run", "tiny", "x", "--adapter", f"mine={tmp_path}", *GREEDY)
    assert (ran.status, ran.out) == (2, "")
    assert "has no adapter_config.json" in ran.err


def test_reads_the_prompt_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("def main():"))
    piped = run("run", "tiny", "-", "--max-tokens", "12", *GREEDY)
    assert piped.out == run("run", "tiny", "def main():", "--max-tokens", "12", *GREEDY).out != ""


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_prompt_that_is_no_text_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch, errors: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"def \xff"), "utf-8", errors))
    ran = run("run", "tiny", "-")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith("penstock: standard input is not text in UTF-8: 'utf-8' codec can't ")


def test_json_has_tokens_reasons_and_usage(run: Run, engine: Engine) -> None:
    ran = run(
        "run", "tiny", "import ", "--raw", "-n", "2", "--seed", "5", "--max-tokens", "8", "--threads", "1", "--json"
    )
    told = json.loads(ran.out)
    (expected,) = engine.generate(["import "], SamplingParams(max_tokens=8, n=2, seed=5, **engine.card.defaults))
    assert [choice["token_ids"] for choice in told["choices"]] == [choice.token_ids for choice in expected.choices]
    assert [choice["text"] for choice in told["choices"]] == [choice.text for choice in expected.choices]
    assert told["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert told["usage"]["output_tokens"] == sum(len(choice["token_ids"]) for choice in told["choices"])


def test_several_outputs_come_under_headings(run: Run) -> None:
    ran = run("run", "tiny", "import ", "--raw", "-n", "2", "--max-tokens", "4", "--ignore-eos", "--threads", "1")
    assert ran.err.startswith("(2 of 2 outputs are cut: ")
    assert [line for line in ran.out.splitlines() if line.startswith("---")] == [
        "--- 0 (length) ---",
        "--- 1 (length) ---",
    ]


def test_chat_goes_through_the_models_template(run: Run, engine: Engine) -> None:
    ran = run("run", "tiny", "What is os?", "--chat", "--system", "Be brief.", "--max-tokens", "9", "--json", *GREEDY)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is os?"}]
    prompt = engine.tokenizer.encode(ChatTemplate.from_folder(TINY).render(messages), add_special_tokens=False)
    (expected,) = engine.generate([prompt], SamplingParams(max_tokens=9, temperature=0))
    told = json.loads(ran.out)
    assert told["choices"][0]["token_ids"] == expected.token_ids
    assert told["usage"]["prompt_tokens"] == len(prompt)


def test_samples_as_it_is_told_to(run: Run, engine: Engine) -> None:
    options = ("--temperature", "0.9", "--top-k", "40", "--min-p", "0.02", "--seed", "3", "--threads", "1")
    penalties = ("--repetition-penalty", "1.3", "--presence-penalty", "0.5", "--frequency-penalty", "0.2")
    ran = run("run", "tiny", "import ", "--raw", "--max-tokens", "16", *options, *penalties, "--json")
    params = SamplingParams(
        max_tokens=16,
        temperature=0.9,
        top_k=40,
        top_p=engine.card.defaults["top_p"],
        min_p=0.02,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.2,
    )
    (expected,) = engine.generate(["import "], params)
    assert json.loads(ran.out)["choices"][0]["token_ids"] == expected.token_ids


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("tiny", "x", "--temperature", "-1"), "--temperature is -1.0; it must be a number from 0 (greedy) to 100"),
        (("tiny", "x", "-n", "0"), "-n is 0"),
        (("tiny", "x", "--dtype", "int3"), "--dtype is 'int3'; it must be one of auto"),
        (("tiny", "x", "--quantization", "int3"), "--quantization is 'int3'; it must be one of none, fp8"),
        (("tiny", "x", "--device", "cpu", "--quantization", "fp8"), ": --quantization='fp8' needs a CUDA device"),
        (("tiny", "x", "--min-tokens", "9", "--max-tokens", "5"), ": --min-tokens=9 is more than --max-tokens=5"),
        (("tiny", "x", "--allow-token", "3", "--ban-token", "3"), ": --allow-token has no token that --ban-token does"),
        (("tiny", "x", "--system", "y", "--raw"), "--system is a chat's"),
        (("tiny", ""), "prompt"),
        (("nothing", "x"), "no model 'nothing'"),
    ],
)
def test_what_cannot_be_run_is_refused(run: Run, args: tuple[str, ...], says: str) -> None:
    ran = run("run", *args)
    assert (ran.status, ran.out) == (2, "")
    assert says in " ".join(ran.err.split())


def test_ctrl_c_ends_it_with_status_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.cli import terminal as show

    def interrupted(self: show.TextStream, event: dict[str, object]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(show.TextStream, "show", interrupted)
    ran = run("run", "tiny", "def main():", "--threads", "1")
    assert (ran.status, ran.err) == (130, "penstock: interrupted\n")


def test_an_output_of_a_schema_ends(run: Run) -> None:
    asked = ("run", "tiny", "x = 11111111111111", "--raw", "--max-tokens", "60", *GREEDY, "--json", "--json-schema")
    ended = {
        comment: json.loads(run(*asked, json.dumps({"type": "number", "$comment": comment})).out)["choices"][0]
        for comment in ("", "penstock:0")
    }
    assert {comment: choice["finish_reason"] for comment, choice in ended.items()} == {
        "": "stop",
        "penstock:0": "length",
    }, "to the letter, a number has no end"
    assert isinstance(json.loads(ended[""]["text"]), float)
    (choice,) = json.loads(run(*asked[:-1], "--choice", "yes", "--choice", "no").out)["choices"]
    assert (choice["text"] in ("yes", "no"), choice["finish_reason"]) == (True, "stop")
