"""Tokenizes large texts in a child process: they may take seconds, and a model's own patterns for ever.

texts -> the child, which has loaded the same tokenizer.json -> token ids, or the first error and whose it is
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from engine.confined import ConfinedProcess, Limits
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer

_TARGET: Final = "engine.text.confined_tokenizer:worker"
#: Limits of all texts of a request. The child yields to small texts, which this process tokenizes itself.
LIMITS: Final = Limits(cpu=10.0, wall=30.0, memory=2 << 30, output=32 << 20, nice=5)
#: An array's type of token ids, of 4 bytes each.
_IDS: Final = "I"


class TextError(RequestError):
    """An error of one of several texts. `at`: which one's."""

    def __init__(self, message: str, at: int, *, param: str | None, code: str) -> None:
        super().__init__(message, param=param, code=code)
        self.at = at


class ConfinedTokenizer:
    """A tokenizer in a child process. Blocking and thread-safe: calls take turns. The first one starts the child and
    loads the tokenizer there. Close it after use.

    `tokenizer`: the content of tokenizer.json, which `Tokenizer` has taken.
    """

    def __init__(self, tokenizer: bytes, limits: Limits = LIMITS) -> None:
        self._process = ConfinedProcess(_TARGET, {"tokenizer": tokenizer.decode()}, limits)

    def encode_all(self, texts: Sequence[str], special: bool) -> list[tuple[int, ...]]:
        """Token ids of each text; with `special`, including the tokenizer's special tokens around it.

        Raises TextError as `Tokenizer.encode` does, and Stopped.
        """
        answer = self._process.call({"encode": list(texts), "special": special})
        return [tuple(array(_IDS, b64decode(ids))) for ids in self._done(answer)]

    def decode_all(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """The text of each prompt, without special tokens. Raises as `encode_all` does."""
        answer = self._process.call({"decode": [_packed(ids) for ids in prompts]})
        return self._done(answer)

    def kill(self) -> None:
        """End the call that runs, if one does: it raises Stopped."""
        self._process.kill()

    def close(self) -> None:
        """End the child, after the current call. A later call starts another."""
        self._process.close()

    def _done(self, answer: Mapping[str, Any]) -> list[str]:
        if "error" in answer:
            raise TextError(**answer["error"])
        done: list[str] = answer["done"]
        return done


def worker(setup: Mapping[str, str]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Makes the function that the child runs for each request."""
    tokenizer = Tokenizer({"tokenizer.json": setup["tokenizer"].encode()})

    def work(request: Mapping[str, Any]) -> dict[str, Any]:
        done: list[str] = []
        texts = request.get("encode") or request["decode"]
        for at, text in enumerate(texts):
            try:
                if "encode" in request:
                    done.append(_packed(tokenizer.encode(text, request["special"])))
                else:
                    done.append(tokenizer.decode(array(_IDS, b64decode(text))))
            except RequestError as error:
                return {"error": {"message": str(error), "at": at, "param": error.param, "code": error.code}}
        return {"done": done}

    return work


def _packed(ids: Iterable[int]) -> str:
    return b64encode(array(_IDS, ids).tobytes()).decode()
