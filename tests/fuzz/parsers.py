"""Each reader of what strangers write by itself: bytes in, a value or one of its own errors out.

    python -m tests.fuzz.parsers header --seconds 60         # atheris: guided by what is reached (pip install atheris)
    python -m tests.fuzz.parsers task --examples 20000       # Hypothesis: good texts, changed

`tests/fuzz/corpus/<target>` holds what was found; the tests run all of it, and some fresh examples of each target.
"""

from __future__ import annotations

import argparse
import inspect
import json
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from engine.errors import ModelError, RequestError
from engine.text import Tokenizer
from engine.text.config import Config, read_config
from engine.text.template import TemplateSource
from engine.text.tensors import read_header
from producers.admin.dead_letters import Letter
from producers.contract.fields import read_json
from producers.contract.message import is_plain
from producers.contract.task import Task
from producers.errors import InvalidTask
from producers.gateway.http.errors import Problem, body_of, problem_of
from producers.gateway.openai.chat import PARAMETERS as CHAT
from producers.gateway.openai.completions import PARAMETERS as COMPLETIONS
from tests.fuzz.drawing import drawn
from tests.fuzz.messages import messages, tasks
from tests.fuzz.requests import body_for
from tests.fuzz.trees import json_bytes, spoiled, spoiled_bytes

TINY = Path(__file__).parents[2] / "workers" / "models" / "tiny"
#: Modules in which what an example reaches is looked at.
GUIDED = (
    "engine.text",
    "producers.contract.task",
    "producers.gateway.openai",
    "producers.admin.dead_letters",
    "producers.contract.message",
    "json",
)
CORPUS = Path(__file__).parent / "corpus"


def _names(error: Exception, what: str) -> None:
    """An error that does not say what is wrong helps nobody."""
    if what not in str(error):
        raise AssertionError(f"{what} is not named: {error}") from error


def _header(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(data)
        file.flush()
        try:
            found = read_header(Path(file.name))
        except ModelError as error:
            _names(error, file.name)
            return
        assert all(isinstance(tensor.shape, tuple) for tensor in found.values())


def _config(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(data)
        try:
            Config.of_model(read_config(folder))
        except ModelError as error:
            _names(error, "config.json")


def _tokenizer(data: bytes) -> None:
    """What loads has to take any text."""
    try:
        made = Tokenizer({"tokenizer.json": data})
    except ModelError as error:
        _names(error, "tokenizer.json")
        return
    try:
        ids = made.encode("def f(x): é💥")
    except RequestError:
        return
    made.decode(ids)


def _template(data: bytes) -> None:
    try:
        TemplateSource.from_bytes({"tokenizer_config.json": data})
    except ModelError as error:
        _names(error, "template" if "template" in str(error) else "tokenizer_config.json")


@cache
def _tiny() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


def _detokenizer(data: bytes) -> None:
    """Pieces, joined, are the whole's text, wherever characters are cut."""
    tokenizer = _tiny()
    ids = [token % tokenizer.vocab_size for (token,) in struct.iter_unpack("<H", data[: len(data) // 2 * 2])]
    made = tokenizer.new_detokenizer()
    assert "".join([*map(made.push, ids), made.flush()]) == tokenizer.decode(ids)


def _task(data: bytes) -> None:
    try:
        Task.parse_json(data)
    except InvalidTask as error:
        json.dumps(body_of(problem_of(error))).encode()


def _openai(data: bytes) -> None:
    for parameters in (CHAT, COMPLETIONS):
        try:
            body = read_json(data)
            if isinstance(body, dict):
                parameters.read(body, None)
        except (InvalidTask, Problem) as error:
            json.dumps(body_of(problem_of(error))).encode()


def _message(data: bytes) -> None:
    """As dead letters and workers look at it."""
    letter = Letter.parse(data)
    assert len(letter.key) == 12
    try:
        headers = json.loads(data)["headers"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return
    if isinstance(headers, dict):
        assert is_plain(headers) in (True, False)


@dataclass(frozen=True, slots=True)
class Target:
    """`read` raises what is a fault; `good` draws what is nearly right."""

    read: Callable[[bytes], None]
    good: st.SearchStrategy[bytes]


def _near(tree: Any) -> st.SearchStrategy[bytes]:
    """JSON like this, changed."""
    return spoiled(tree).flatmap(json_bytes).flatmap(spoiled_bytes)


def _framed(body: bytes) -> bytes:
    """As a header stands in a safetensors file, with 24 bytes of data."""
    return struct.pack("<Q", len(body)) + body + bytes(24)


TENSORS = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 3,
            "content": "<s>",
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    },
}

TARGETS: dict[str, Target] = {
    "header": Target(_header, _near(TENSORS).map(_framed) | _near(TENSORS).map(_framed).flatmap(spoiled_bytes)),
    "config": Target(_config, _near(json.loads((TINY / "config.json").read_text()))),
    "tokenizer": Target(_tokenizer, _near(TOKENIZER)),
    "template": Target(
        _template, _near({"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "bos_token": "<s>"})
    ),
    "detokenizer": Target(_detokenizer, st.binary(max_size=64)),
    "task": Target(_task, tasks("m").flatmap(_near)),
    "openai": Target(
        _openai,
        st.sampled_from(("chat/completions", "completions")).flatmap(lambda path: body_for(path, "m")).flatmap(_near),
    ),
    "message": Target(_message, messages("m").map(lambda fuzzed: fuzzed.raw)),
}


def corpus(name: str) -> Iterator[Path]:
    """What was found of a target, a file each."""
    yield from sorted((CORPUS / name).glob("*"))


def _guided(name: str, seconds: int) -> None:
    """Ends with atheris' own exit status; a case that it finds is written beside where it runs."""
    import atheris

    seeds = tempfile.mkdtemp(prefix="penstock-corpus-")
    for number, data in enumerate(drawn(TARGETS[name].good, 200, 1)):
        (Path(seeds) / str(number)).write_bytes(data)
    for module in [found for known, found in sys.modules.items() if known.startswith(GUIDED)]:
        for one in vars(module).values():
            for function in vars(one).values() if inspect.isclass(one) else (one,):
                if inspect.isfunction(function) and function.__module__.startswith(GUIDED):
                    atheris.instrument_func(function)
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={seconds}",
            "-max_len=65536",
            seeds,
            *map(str, (CORPUS / name,) if (CORPUS / name).is_dir() else ()),
        ],
        TARGETS[name].read,
    )
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, help="with atheris, for so long")
    parser.add_argument("--examples", type=int, default=10_000, help="with Hypothesis, so many")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.seconds is not None:
        _guided(args.target, args.seconds)
        return
    for data in drawn(TARGETS[args.target].good, args.examples, args.seed):
        try:
            TARGETS[args.target].read(data)
        except BaseException:
            print(f"after {data!r}", file=sys.stderr)
            raise
    print(f"{args.examples} examples of {args.target}: no fault")


if __name__ == "__main__":
    main()
