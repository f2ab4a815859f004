"""Writes pairs for decoders that score them, by the chat template, with a message of the role `query` and one of the
role `document`, as Sentence-Transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from engine.errors import ModelError
from engine.text import ConfinedTemplate, TemplateSource, Tokenizer
from engine.text.files import read_files
from engine.text.pooling import ScoreSettings
from engine.text.tokenizer import EncodedText

#: Texts by which one sees whether the template writes what it is given.
_PROBES: Final = (("penstockquery", "penstockdocument"), ("queryofpenstock", "documentofpenstock"))


class PairTemplate:
    """The chat template of a folder, in a process of its own. Thread-safe. Close it after use."""

    def __init__(self, folder: Path, tokenizer: Tokenizer | None, settings: ScoreSettings) -> None:
        """Raises ModelError for a folder whose template does not write pairs."""
        source = None if tokenizer is None else TemplateSource.from_bytes(read_files(folder))
        if source is None or tokenizer is None:
            raise ModelError(f"{folder}: pairs are written by a chat template, and it has none")
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
