"""The tokenizer.json and tokenizer_config.json of a GGUF file, from its metadata.

Two kinds of vocabularies are served, by `tokenizer.ggml.model`:

    gpt2    byte-level BPE: tokens and merges; `tokenizer.ggml.pre` names how text is split before
    llama   SentencePiece's BPE: tokens and scores. Any two neighbours that are a token together merge, best score
            first; bytes without a token are spelled <0xNN>. Its merges are listed here

Texts are encoded as llama.cpp and the original's tokenizer.json do: with SentencePiece, each text after a special token
gets a space before it if `add_space_prefix` is not false.
"""

from __future__ import annotations

import json
from typing import Any, Final

from engine.declared import shown
from engine.errors import ModelError
from engine.text.gguf.header import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE: Final = "▁"
#: The most characters of a SentencePiece vocabulary, and of its longest token: each is a place where one may be cut.
_MOST_CHARACTERS: Final = 4 << 20
_LONGEST_TOKEN: Final = 1 << 12
#: The most merges of such a vocabulary, and the characters of all. Gemma's have some 600,000, of 7 characters each.
_MOST_MERGES: Final = 1 << 20
_MOST_MERGED: Final = 1 << 25

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _END
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _END
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_END: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_CASED_END}"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_CASED_END}"
)
#: The splits of text before BPE, by the name of tokenizer.ggml.pre. None: as GPT-2, which `ByteLevel` has built in.
_SPLITS: Final[dict[str, str | None]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "default"), None),
    # GPT-2's, after digits stand alone.
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), None),
}
_SINGLE_DIGITS: Final = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell"})
#: Splits of models whose own tokenizers compose letters and accents first.
_COMPOSED: Final = frozenset({"qwen2", "deepseek-r1-qwen"})
#: Splits whose vocabularies have words that no merges lead to, and which begin texts with BOS unless the file says no.
_WHOLE_WORDS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})


def tokenizer_files(file: GgufFile) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json. Raises ModelError naming what is missing or not served."""
    tokens = file.texts("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path} has no tokenizer: tokenizer.ggml.tokens is missing")
    # llama.cpp names empty tokens so.
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    kinds = list(file.numbers("tokenizer.ggml.token_type")) or [1] * len(tokens)
    if len(kinds) < len(tokens):
        raise ModelError(f"{file.path} has {len(tokens)} tokens, and tokenizer.ggml.token_type has {len(kinds)}")
    vocabulary = _Vocabulary(file, tokens, kinds)
    model = file.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path} has tokenizer.ggml.model={shown(model)}, which is not served; gpt2 and llama are"
        )
    parts = vocabulary.byte_level() if model == "gpt2" else vocabulary.sentencepiece()
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, **parts}
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": _tokenizer_config(file, tokens)}
    return {name: json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") for name, value in files.items()}


class _Vocabulary:
    def __init__(self, file: GgufFile, tokens: list[str], kinds: list[int]) -> None:
        self._file, self._tokens, self._kinds = file, tokens, kinds

    def byte_level(self) -> dict[str, Any]:
        name = self._file.get("tokenizer.ggml.pre") or "default"
        if name not in _SPLITS:
            raise ModelError(
                f"{self._file.path} has tokenizer.ggml.pre={shown(name)}, which is not served; "
                f"{', '.join(sorted(_SPLITS))} are"
            )
        split = _SPLITS[name]
        pattern = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        digits = {"type": "Digits", "individual_digits": True}
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
        before = [pattern] if split is not None else [digits] if name in _SINGLE_DIGITS else []
        vocabulary = {token: i for i, token in enumerate(self._tokens)}
        return {
            "added_tokens": self._added(self._tokens),
            "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*before, level]},
            "post_processor": self._post_processor(bos=name in _WHOLE_WORDS),
            "decoder": level,
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": self._file.texts("tokenizer.ggml.merges"),
                "ignore_merges": name in _WHOLE_WORDS,
            },
        }

    def sentencepiece(self) -> dict[str, Any]:
        gemma = str(self._file.get("general.architecture")).startswith("gemma")
        # Gemma's files spell tokens of spaces alone as they are. Texts reach them with their spaces replaced.
        tokens = [_SPACE * len(token) if gemma and not token.strip(" ") else token for token in self._tokens]
        prefix = self._file.get("tokenizer.ggml.add_space_prefix") is not False
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizers = [{"type": "Prepend", "prepend": _SPACE}, replaced] if prefix else [replaced]
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        vocabulary = {token: i for i, token in enumerate(tokens)}
        unknown = self._special("unknown")
        return {
            "added_tokens": self._added(tokens),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": self._post_processor(bos=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": True,
                "vocab": vocabulary,
                "merges": self._merges(tokens, vocabulary, gemma),
            },
        }

    def _merges(self, tokens: list[str], vocabulary: dict[str, int], by_place: bool) -> list[list[str]]:
        """Every way in which two tokens are a third, the best first. The better of two is that with the better score,
        or, in Gemma's vocabularies, which are in the order of their merges, that which comes first."""
        listed = self._file.texts("tokenizer.ggml.merges")
        if listed:
            return [merge.split(" ", 1) for merge in listed]
        longest = max(map(len, tokens))
        if sum(map(len, tokens)) > _MOST_CHARACTERS or longest > _LONGEST_TOKEN:
            raise ModelError(
                f"{self._file.path} has a vocabulary of {sum(map(len, tokens))} characters and a token of {longest}; "
                f"at most {_MOST_CHARACTERS} and {_LONGEST_TOKEN} are read"
            )
        scores = list(self._file.numbers("tokenizer.ggml.scores"))
        if by_place:
            # Added tokens, such as those of spaces, go before all others, the longest first.
            scores = [1 if self._kinds[i] == _USER_DEFINED else -i for i in range(len(tokens))]
        if len(scores) < len(tokens):
            raise ModelError(f"{self._file.path} has {len(tokens)} tokens and the scores of {len(scores)}")
        merges, merged = [], 0
        for whole, score in zip(tokens, scores, strict=False):
            for cut in range(1, len(whole)):
                first, second = whole[:cut], whole[cut:]
                if first in vocabulary and second in vocabulary:
                    merges.append((score, len(first), len(second), -vocabulary[first], -vocabulary[second]))
                    merged += len(whole)
            if len(merges) > _MOST_MERGES or merged > _MOST_MERGED:
                raise ModelError(
                    f"{self._file.path} has a vocabulary of more than {_MOST_MERGES} merges, or of more than "
                    f"{_MOST_MERGED} characters in them"
                )
        merges.sort(reverse=True)
        return [[tokens[-first], tokens[-second]] for *_, first, second in merges]

    def _added(self, tokens: list[str]) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split: control tokens, which have no text in outputs, and
        those that somebody added."""
        name = str(self._file.get("general.name")).lower()
        after = "phi-3" in name or "phi3" in name
        added = []
        for i, (token, kind) in enumerate(zip(tokens, self._kinds, strict=False)):
            if kind in (_UNKNOWN, _CONTROL) or (kind == _USER_DEFINED and token == self._tokens[i]):
                special = kind != _USER_DEFINED
                added.append(
                    {
                        "id": i,
                        "content": token,
                        "single_word": False,
                        "lstrip": False,
                        # Phi-3's tokens take the space behind them. Files do not say so; llama.cpp goes by the name.
                        "rstrip": after and token not in ("<unk>", "<s>", "<|endoftext|>"),
                        "normalized": False,
                        "special": special,
                    }
                )
        return added

    def _post_processor(self, *, bos: bool) -> dict[str, Any] | None:
        """The tokens around a text. `bos`: whether one begins it if the file does not say."""
        flag = self._file.get("tokenizer.ggml.add_bos_token")
        first = self._special("bos") if (bos if flag is None else flag) else None
        last = self._special("eos") if self._file.get("tokenizer.ggml.add_eos_token") else None
        around = {self._tokens[i]: i for i in (first, last) if i is not None}
        if not around:
            return None

        def pieces(text: str, type_id: int) -> list[dict[str, Any]]:
            special = [{"SpecialToken": {"id": self._tokens[i], "type_id": type_id}} for i in (first,) if i is not None]
            end = [{"SpecialToken": {"id": self._tokens[i], "type_id": type_id}} for i in (last,) if i is not None]
            return [*special, {"Sequence": {"id": text, "type_id": type_id}}, *end]

        return {
            "type": "TemplateProcessing",
            "single": pieces("A", 0),
            "pair": pieces("A", 0) + pieces("B", 1),
            "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in around.items()},
        }

    def _special(self, name: str) -> int | None:
        value = self._file.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(self._tokens) else None


def _tokenizer_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    """The special tokens that a chat template sees, and the templates."""
    config: dict[str, Any] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        value = file.get(f"tokenizer.ggml.{name}_token_id")
        if type(value) is int and 0 <= value < len(tokens):
            config[f"{ {'unknown': 'unk', 'padding': 'pad'}.get(name, name) }_token"] = tokens[value]
    default = file.get("tokenizer.chat_template")
    with_tools = file.get("tokenizer.chat_template.tool_use")
    if isinstance(default, str) and isinstance(with_tools, str):
        config["chat_template"] = [
            {"name": "default", "template": default},
            {"name": "tool_use", "template": with_tools},
        ]
    elif isinstance(default, str):
        config["chat_template"] = default
    return config
