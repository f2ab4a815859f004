"""What fails a batch as a whole, with its lines; what is left to each line; and within which memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest

from producers.store.blobs import Line
from producers.sweeper.batches import input
from producers.sweeper.batches.input import MAX_ERRORS, Checked, check

URL = "/v1/chat/completions"
MODELS = {"tiny", "tiny-v2"}


def _line(custom_id: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "tiny", "messages": []}} | fields


def _check(lines: Iterable[bytes | dict[str, Any] | None], **options: Any) -> Checked:
    texts = [json.dumps(line).encode() if isinstance(line, dict) else line for line in lines]

    def read() -> Iterable[Line]:
        at = 0
        for number, text in enumerate(texts, 1):
            size = 9_999_999 if text is None else len(text) + 1
            yield Line(number, at, at + size, text)
            at += size

    return check(read, URL, MODELS, **options)


def test_a_valid_input_is_counted_without_its_blank_lines() -> None:
    bad_body = _line("c", body={"model": "tiny-v2", "temperature": "hot", "nonsense": 1})
    checked = _check(
        [b"\xef\xbb\xbf" + json.dumps(_line()).encode(), b"", _line("b", comment=1), b" \t", bad_body, b""]
    )
    assert checked == Checked(3, frozenset(MODELS), ())


@pytest.mark.parametrize(
    ("line", "code", "param", "says"),
    [
        (b"{", "invalid_json_line", None, "not JSON"),
        (b"[" * 60_000, "invalid_json_line", None, "not JSON"),
        (b'{"a": [' + b"{}," * 100_000 + b"1]}", "invalid_request", None, "100003 lists, objects and strings"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json_line", None, "not JSON"),
        (b"\xff{}", "invalid_json_line", None, "bad byte at 0"),
        ('{"custom_id": "a"}'.encode("utf-16"), "invalid_json_line", None, "not UTF-8"),
        (b'"text"', "invalid_json_line", None, "must be a JSON object"),
        (None, "invalid_request", None, "9999999 bytes"),
        (_line(None), "invalid_request", "custom_id", "custom_id is missing"),
        (_line(7), "invalid_request", "custom_id", "custom_id is 7"),
        (_line(""), "invalid_request", "custom_id", "1 to 512"),
        (_line("x" * 513), "invalid_request", "custom_id", "1 to 512"),
        (_line(method="GET"), "invalid_request", "method", '"GET"'),
        (_line(url="/v1/completions"), "url_mismatch", "url", '"/v1/completions"'),
        (_line(url=None), "url_mismatch", "url", "url is missing"),
        (_line(body=None), "invalid_request", "body", "body is missing"),
        (_line(body=[]), "invalid_request", "body", "[]"),
        (_line(body={}), "invalid_request", "body.model", "body.model is missing"),
        (_line(body={"model": 1}), "invalid_request", "body.model", "body.model is 1"),
        (_line(body={"model": "tinny"}), "model_not_found", "body.model", 'did you mean "tiny"?'),
        (_line(body={"model": "zzz"}), "model_not_found", "body.model", "tiny, tiny-v2"),
        (_line("first"), "duplicate_custom_id", "custom_id", "of line 1"),
    ],
)
def test_a_bad_line_fails_the_batch_by_its_number(line: Any, code: str, param: str | None, says: str) -> None:
    (error,) = _check([_line("first"), b"", line, _line("last")]).errors
    assert (error.code, error.line, error.param) == (code, 3, param)
    assert says in error.message


def test_all_errors_are_told_in_the_order_of_their_lines_up_to_a_limit() -> None:
    lines = [_line("a"), _line("a"), b"{", _line("b"), _line("b"), _line("a", method="x")]
    assert [(error.line, error.code) for error in _check(lines).errors] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
        (5, "duplicate_custom_id"),
        (6, "invalid_request"),
    ]
    assert len(_check([b"{"] * 500).errors) == MAX_ERRORS
    assert len(_check([_line(str(k // 2)) for k in range(2000)]).errors) == MAX_ERRORS


def test_a_file_without_requests_or_with_too_many_fails() -> None:
    for lines in ([], [b"", b" "]):
        assert [(error.code, error.line) for error in _check(lines).errors] == [("empty_file", None)]
    assert not _check([_line(str(k)) for k in range(3)], max_lines=3).errors
    assert [(e.code, e.line) for e in _check([_line(str(k)) for k in range(5)], max_lines=3).errors] == [
        ("too_many_tasks", 4)
    ]


def test_ids_of_equal_hash_are_no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input, "hash", len, raising=False)
    assert not _check([_line(text) for text in ("a", "b", "c", "dd")]).errors


@pytest.mark.exhaustive
def test_repeats_among_millions_of_lines_are_found_in_bounded_memory() -> None:
    """3 million ids in a process of its own: their texts in a set would take 400 MB."""
    program = """
import resource, sys
from producers.sweeper.batches.input import _Hashes, _hash
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hashes = _Hashes()
for k in range(3_000_000):
    hashes.add(f"request-number-{k}-of-a-very-large-batch")
hashes.add("request-number-77-of-a-very-large-batch")
found = hashes.repeated(99)
assert _hash("request-number-77-of-a-very-large-batch") in found and len(found) < 9, "a few come twice by chance"
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=240)
    assert int(done.stdout) < 40_000, "KB"
