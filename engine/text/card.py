"""A model's card: the description of a model for processes that never load it.

A publisher or a worker writes the card into the store, where a gateway finds it even with no workers. The format is
fixed, one JSON object. A reader ignores keys that it does not know:

    v                 1
       name, version     the model's address; see `model_version` for the version
    architecture      config.json's first architecture
    context_length    tokens of prompt and output together
    vocab_size        rows of the embedding: token ids are below this
    parameters        numbers in the checkpoint's tensors
       capabilities      ["generate"], and "chat" if there is a chat template; or ["embed"], ["classify"],
                      ["token_classify"] or ["rerank"]
    eos_token_ids     list of token ids, may be empty
    bos_token_id      token id or null
    defaults          generation_config.json's own values of the parameters in `engine.params.DEFAULTS`
    files             name -> SHA-256 in hex, of the tokenizer's and template's files
    created           unix seconds
    pooling           only of a model that generates nothing: `dimensions` of a vector, `matryoshka` (those to
                      which it may be cut, or whether it may be cut to any), `prompts` by name, `default_prompt`,
                      `labels` in order, and whether there may be several (`several_labels`)

In the store it has more (`producers.store.fleet.cards`):

    published         unix milliseconds at which it was published; not there while only workers have written it
    publisher         who published it; absent where an earlier release did
    withdrawn         unix milliseconds since when nobody serves it or starts workers of it: it is not listed, and takes
                      no new tasks; absent otherwise
    served            whether a worker of this version has been up; only then is the KV capacity known
    watermark         {"keys": names, "default": name or null, "optional": bool}: its workers' keys of watermarks;
                      absent where they have none
    kv_capacity       tokens of the longest sequence that the KV cache of any worker holds, if less than the context
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine.errors import ModelError, RequestError
from engine.params import DEFAULTS, SamplingParams
from engine.text.checkpoint import count_parameters, model_version
from engine.text.config import Config, architectures, read_config
from engine.text.files import read_files, read_object
from engine.text.gguf import absolute, model_name
from engine.text.pooling import PoolingSettings, label_names, purpose, read_pooling, several_labels, text_length
from engine.text.template import TemplateSource
from engine.text.tokenizer import Tokenizer

#: The settings that name an encoder's width; DistilBERT and Nomic have names of their own.
_WIDTHS = ("hidden_size", "dim", "n_embd")


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    version: str
    architecture: str
    context_length: int
    vocab_size: int
    parameters: int
    capabilities: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    defaults: dict[str, float]
    files: dict[str, str]
    created: int
    pooling: dict[str, Any] | None = None

    @classmethod
    def from_folder(cls, folder: str | Path, name: str | None = None, tokenizer: Tokenizer | None = None) -> ModelCard:
        """Read a model folder without loading the model. `name` defaults to the folder's name; `tokenizer`: the
        folder's, if it is loaded already.

        Raises ModelError naming the file or setting that is missing or broken.
        """
        root = absolute(folder)
        files = read_files(root)
        values = read_config(root)
        named = architectures(values)
        if not named:
            raise ModelError(f"{root / 'config.json'} names no architecture")
        config = Config.of_model(values)
        tokenizer = tokenizer or Tokenizer(files)
        task = purpose(root, values)
        chat = task == "generate" and TemplateSource.from_bytes(files) is not None
        pooling = None if task == "generate" else read_pooling(root)
        length = config.context_length() if pooling is None else text_length(values)
        return cls(
            name=model_name(root) if name is None else name,
            version=model_version(root),
            architecture=named[0],
            context_length=length if pooling is None else min(length, pooling.max_length or length),
            vocab_size=config.integer("vocab_size"),
            parameters=count_parameters(root),
            capabilities=(task, "chat") if chat else (task,),
            eos_token_ids=tokenizer.eos_token_ids,
            bos_token_id=tokenizer.bos_token_id,
            defaults=_defaults(read_object(files, "generation_config.json")),
            files={name: sha256(data).hexdigest() for name, data in sorted(files.items())},
            created=int(time.time()),
            pooling=None if pooling is None else _pooling(task, pooling, config),
        )

    @staticmethod
    def tokenizer_files(folder: str | Path) -> dict[str, bytes]:
        """The contents of the card's `files`, by name, for Tokenizer and ChatTemplate.from_bytes."""
        return read_files(folder)

    def to_json(self) -> str:
        """The card as one line of JSON, with keys in the order of the format."""
        values = asdict(self)
        if self.pooling is None:
            del values["pooling"]
        return json.dumps({"v": 1, **values}, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelCard:
        """Parse a card. Raises ModelError if the text is no card, has another format, or lacks a key."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"the model card is not valid JSON: {error}") from error
        if not isinstance(value, dict) or value.get("v") != 1:
            raise ModelError("the model card is not a JSON object with v=1; it was made by another version of Penstock")
        arguments: dict[str, Any] = {}
        for entry in fields(cls):
            if entry.name not in value:
                if entry.default is not MISSING:
                    continue
                raise ModelError(f"the model card lacks {entry.name!r}")
            arguments[entry.name] = value[entry.name]
        for listed in ("capabilities", "eos_token_ids"):
            if not isinstance(arguments[listed], list):
                raise ModelError(f"the model card has {listed}={arguments[listed]!r}, which is not a list")
            arguments[listed] = tuple(arguments[listed])
        return cls(**arguments)


def _pooling(purpose: str, settings: PoolingSettings, config: Config) -> dict[str, Any]:
    """The card's `pooling`."""
    if purpose == "rerank":
        return {"labels": []}
    if purpose != "embed":
        return {"labels": list(label_names(config)), "several_labels": several_labels(config)}
    width = next((config.integer(name) for name in _WIDTHS if name in config), 768)
    matryoshka = settings.matryoshka
    return {
        "dimensions": settings.dimensions(width),
        "matryoshka": list(matryoshka) if isinstance(matryoshka, tuple) else matryoshka,
        "prompts": settings.prompts,
        "default_prompt": settings.default_prompt,
    }


def _defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The defaults within the bounds of requests. A default out of bounds would fail every request that has none."""
    defaults = {}
    for name in DEFAULTS:
        if generation.get(name) is not None:
            with suppress(RequestError):
                SamplingParams(**{name: generation[name]})
                defaults[name] = generation[name]
    return defaults
