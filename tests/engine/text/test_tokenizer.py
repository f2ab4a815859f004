from __future__ import annotations

import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import ModelError, RequestError
from engine.text.tokenizer import Tokenizer


@pytest.fixture
def files(byte_level) -> dict[str, bytes]:
    return {"tokenizer.json": byte_level.to_str().encode()}


def test_a_folder_and_its_bytes_make_the_same_tokenizer(files, tmp_path):
    files["generation_config.json"] = b'{"eos_token_id": [1, 5], "bos_token_id": 0}'
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    for tokenizer in (Tokenizer.from_folder(tmp_path), Tokenizer(files)):
        assert tokenizer.eos_token_ids == (1, 5)
        assert tokenizer.bos_token_id == 0
        assert tokenizer.decode(tokenizer.encode("import os\n🗼")) == "import os\n🗼"


def test_special_tokens_are_added_on_request_and_read_from_text(files, byte_level):
    tokenizer = Tokenizer(files)
    assert tokenizer.encode("x")[0] == byte_level.token_to_id("<|begin|>")
    assert tokenizer.encode("x", add_special_tokens=False) == tokenizer.encode("x")[1:]
    assert tokenizer.encode("<|end|>", add_special_tokens=False) == [byte_level.token_to_id("<|end|>")]
    assert tokenizer.vocab_size == byte_level.get_vocab_size()
    assert (tokenizer.token(0), tokenizer.token(10**6)) == ("<|begin|>", None)


def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt(byte_level):
    state = json.loads(byte_level.to_str())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {
        "strategy": {"Fixed": 99},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|begin|>",
    }
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(state).encode()})
    assert len(tokenizer.encode("one two three four five six seven", add_special_tokens=False)) not in (4, 99)


def test_a_lone_surrogate_is_a_question_mark(files):
    tokenizer = Tokenizer(files)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_many_threads_may_encode_and_decode_at_once(files):
    tokenizer = Tokenizer(files)
    texts = [f"def f{i}(x): return x * {i}\n" * 20 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: tokenizer.decode(tokenizer.encode(text)), texts)) == texts


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        ({}, None, ()),
        ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 8}}, None, (7,)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": [8, 8], "bos_token_id": 2}}, 2, (8,)),
        ({"tokenizer_config.json": {"eos_token": "<|end|>", "bos_token": {"content": "<|begin|>"}}}, 0, (1,)),
        ({"tokenizer_config.json": {"eos_token": "unknown", "bos_token": None}}, None, ()),
    ],
)
def test_where_the_ends_are_read_from(files, config, bos, eos):
    tokenizer = Tokenizer(files | {name: json.dumps(value).encode() for name, value in config.items()})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (bos, eos)


@pytest.mark.parametrize("value", ["2", -1, [1, None], 1.5, True])
def test_a_bad_end_is_refused_by_file_and_value(files, value):
    files["generation_config.json"] = json.dumps({"eos_token_id": value}).encode()
    with pytest.raises(ModelError, match=r"generation_config\.json has eos_token_id="):
        Tokenizer(files)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"model": {"type": "Nonsense"}}',
    ],
)
def test_a_broken_file_is_refused_by_name(data):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer({"tokenizer.json": data})


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer({})
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def variant(byte_level, **changes) -> Tokenizer:
    return Tokenizer({"tokenizer.json": json.dumps(json.loads(byte_level.to_str()) | changes).encode()})


TEXTS = [
    "",
    "x",
    " " * 999,
    "é🗼" * 50,
    "<think> ｜é" * 9,
    "<|end|>",
    "def f(x):\n    return x\n" * 20,
    "a\ud800b",
    "e\u0301" * 40,
]


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "Sequence", "normalizers": [{"type": "NFC"}]}])
def test_the_size_of_a_text_bounds_its_tokens_from_below(byte_level, normalizer):
    tokenizer = variant(byte_level, normalizer=normalizer)
    for text in TEXTS:
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text
    assert tokenizer.fewest_tokens("x" * 10**6) > 5000


def test_nfc_shortens_no_text_by_more_than_the_bound_takes_for_granted():
    longest = {}  # of all ways to write a character of a decomposition, in bytes
    # Surrogates are no characters; what is private or not assigned is its own decomposition.
    characters = [char for char in map(chr, range(0x110000)) if unicodedata.category(char) not in ("Cs", "Co", "Cn")]
    for char in characters:
        decomposed = unicodedata.normalize("NFD", char)
        if len(decomposed) == 1:
            longest[decomposed] = max(longest.get(decomposed, 0), len(decomposed.encode()), len(char.encode()))
    shrinks = max(
        sum(longest[part] for part in unicodedata.normalize("NFD", char)) / len(char.encode())
        for char in characters
        if unicodedata.normalize("NFC", char) == char
    )
    assert shrinks == 3.5


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "z"}, "content": ""}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "z+"}, "behavior": "Removed", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
                ],
            }
        },
    ],
)
def test_parts_that_drop_text_leave_no_bound(byte_level, changes):
    assert variant(byte_level, **changes).bytes_per_token is None
    assert variant(byte_level, **changes).fewest_tokens("x" * 10**6) == 0


def test_tokens_that_swallow_spaces_or_lack_a_byte_leave_no_bound(byte_level, byte_fallback):
    state = json.loads(byte_level.to_str())
    state["added_tokens"][0]["lstrip"] = True
    assert Tokenizer({"tokenizer.json": json.dumps(state).encode()}).bytes_per_token is None
    lacking = json.loads(byte_level.to_str())
    del lacking["model"]["vocab"]["ÿ"]
    assert Tokenizer({"tokenizer.json": json.dumps(lacking).encode()}).bytes_per_token is None
    assert Tokenizer({"tokenizer.json": byte_fallback.to_str().encode()}).bytes_per_token is None


def test_a_text_whose_size_exceeds_the_limit_is_not_encoded(byte_level, monkeypatch):
    tokenizer = variant(byte_level)
    longest = tokenizer.bytes_per_token
    assert len(tokenizer.encode("x" * longest, add_special_tokens=False, limit=1)) > 1, "it may be one token"
    monkeypatch.setattr(tokenizer, "_backend", None)
    with pytest.raises(RequestError, match="has at least 3 tokens, by its size; the model's context has 2") as error:
        tokenizer.encode("x" * (2 * longest + 1), limit=2)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
