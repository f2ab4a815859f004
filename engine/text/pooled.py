"""Texts as a model that generates nothing reads them: tokens of a text or of a pair, and the prompt before it; no
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from engine.errors import ModelError, RequestError
from engine.text.confined_template import ConfinedTemplate
from engine.text.files import read_files
from engine.text.pooling import PoolingSettings, ScoreSettings
from engine.text.template import TemplateSource
from engine.text.tokenizer import EncodedText, Tokenizer

#: A text, or its token ids with the model's special tokens.
Text = str | list[int]

#: Texts by which one sees whether the template writes what it is given.
_PROBES: Final = (("penstockquery", "penstockdocument"), ("queryofpenstock", "documentofpenstock"))


class PairTemplate:
    """The chat template of a folder, in a process of its own. Thread-safe. Close it after use."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None, settings: ScoreSettings) -> None:
        """Raises ModelError for a folder whose template does not write pairs."""
        source = None if tokenizer is None else TemplateSource.from_bytes(read_files(folder))
        if source is None or tokenizer is None:
            raise ModelError(
                f"{folder}: this kind of reranker writes query and text by a chat template, and the folder has none"
            )
        self._tokenizer, self._settings = tokenizer, settings
        self._template = ConfinedTemplate(source)
        # A template takes a message's content as a text, or as a list of parts.
        self._parts = False
        try:
            if not self._writes():
                self._parts = True
                if not self._writes():
                    raise ModelError(f"{folder}: the chat template does not write messages of query and document")
            #: The tokens after a document, which are kept if that is cut.
            self._suffix = self._common_suffix()
        except BaseException:
            self._template.close()
            raise

    def encode(self, query: str, document: str, limit: int | None = None) -> EncodedText:
        """The tokens of a pair. `limit`: the most; what is beyond is cut from the document's end. Raises
        RequestError."""
        ids = self._tokenizer.encode(self._render(query, document), add_special_tokens=False)
        whole = len(ids)
        if limit is not None and whole > limit:
            kept = min(self._suffix, limit)
            ids = ids[: limit - kept] + ids[whole - kept :]
        return EncodedText(ids, None, whole)

    def close(self) -> None:
        self._template.close()

    def _render(self, query: str, document: str) -> str:
        return self._template.render(
            [self._message("query", query), self._message("document", document)],
            add_generation_prompt=self._settings.add_generation_prompt,
        )

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if self._parts else text}

    def _writes(self) -> bool:
        """Whether the template writes both texts as they are."""
        try:
            text = self._render(*_PROBES[0])
        except ValueError:  # RequestError: it does not take such messages
            return False
        quoted = "[{" in text
        return all(part in text for part in _PROBES[0]) and not (self._parts and quoted)

    def _common_suffix(self) -> int:
        first, second = (self.encode(*probe).ids for probe in _PROBES)
        common = 0
        while common < min(len(first), len(second)) and first[-1 - common] == second[-1 - common]:
            common += 1
        return common


class WrittenPairs:
    """Pairs with texts around them, as the first code for Qwen3-Reranker has them: what stands before the pair, the
    pair and what stands after it become tokens each by itself, and only the pair is cut."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None, around: tuple[str, str, str, str]) -> None:
        """Raises ModelError for a folder without a tokenizer."""
        if tokenizer is None:
            raise ModelError(f"{folder}: pairs are texts, and it has no tokenizer.json")
        self._tokenizer, (first, self._before, self._between, last) = tokenizer, around
        self._first, self._last = (tokenizer.encode(text, add_special_tokens=False) for text in (first, last))

    def encode(self, query: str, document: str, limit: int | None = None) -> EncodedText:
        """See PairTemplate.encode."""
        pair = self._tokenizer.encode(f"{self._before}{query}{self._between}{document}", add_special_tokens=False)
        around = len(self._first) + len(self._last)
        whole = len(pair) + around
        if limit is not None:
            pair = pair[: max(0, limit - around)]
        return EncodedText([*self._first, *pair, *self._last][:limit], None, whole)

    def close(self) -> None:
        """Nothing: there is no process."""


def _pairs(folder: Path, tokenizer: Tokenizer | None, score: ScoreSettings) -> PairTemplate | WrittenPairs:
    if score.around is None:
        return PairTemplate(folder, tokenizer, score)
    return WrittenPairs(folder, tokenizer, score.around)


class PooledTexts:
    """Thread-safe. Close it after use."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        settings: PoolingSettings,
        max_model_len: int,
        vocab_size: int,
        *,
        spans: bool = False,
    ) -> None:
        """`settings`: of the model in `folder`. `max_model_len`: the most tokens of a text. `spans`: whether it is to
        be known where in a text each token stands. Raises ModelError."""
        self._spans = spans
        self._tokenizer = tokenizer
        self._settings = settings
        self._max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._pairs = None if settings.score is None else _pairs(folder, tokenizer, settings.score)

    def text_before(self, name: str | None) -> str:
        """See PoolingSettings."""
        return self._settings.text_before(name)

    def prompt_tokens(self, prompt: str) -> int:
        """The tokens that a prompt makes at the beginning of a text, as Sentence-Transformers counts them: those that
        it has by itself, without a special token at its end."""
        if self._tokenizer is None or not prompt:
            return 0
        ids = self._tokenizer.encode(prompt)
        plain = self._tokenizer.encode(prompt, add_special_tokens=False)
        ends_special = not plain or ids[-1] != plain[-1]
        return len(ids) - ends_special

    def encoded(self, text: Text, truncate: bool, second: str | None = None) -> EncodedText:
        """A text, or a pair, as the model reads it; cut to the tokens that it takes, if `truncate`. Raises
        RequestError."""
        limit = self._max_model_len if truncate else None
        if not isinstance(text, str):
            return EncodedText(list(text[:limit]), None, len(text))
        if self._pairs is not None and second is not None:
            return self._pairs.encode(text, second, limit)
        if self._tokenizer is None:
            raise RequestError("the model has no tokenizer.json: texts must be token ids", param="input")
        if self._spans:
            return self._tokenizer.encode_spans(text, limit)
        return self._tokenizer.encode_pair(text, second, limit)

    def close(self) -> None:
        if self._pairs is not None:
            self._pairs.close()
