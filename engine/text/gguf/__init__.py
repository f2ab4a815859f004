"""Reads a GGUF file as the Hugging Face folder that it was made of.

header: the file's metadata and tensors, within bounds
config: config.json and generation_config.json, of the metadata
tensors: the checkpoint's tensors by transformers' names, and how llama.cpp's layout is undone
tokenizer: tokenizer.json and tokenizer_config.json, with the chat template

files.py, config.py, tensors.py and checkpoint.py beside this folder call these where a model is such a file, so
everything else sees a folder. The weights themselves are read by engine/models/loader.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from engine.text.gguf.config import TYPES, config_of, generation_config_of, in_memory
from engine.text.gguf.header import (
    SUFFIX,
    FileState,
    GgufFile,
    absolute,
    gguf_of,
    model_name,
    parts_of,
    read_gguf,
    states_of,
)
from engine.text.gguf.tensors import GgufTensor, located_in
from engine.text.gguf.tokenizer import tokenizer_files

__all__ = [
    "SUFFIX",
    "TYPES",
    "GgufFile",
    "GgufTensor",
    "absolute",
    "config_of",
    "gguf_of",
    "in_memory",
    "located_in",
    "model_name",
    "parts_of",
    "read_gguf",
    "text_files",
]


def text_files(path: Path) -> dict[str, bytes]:
    """A file's tokenizer, settings and template, as `engine.text.files.read_files` gives a folder's.

    Those of the last model are kept: merges of a SentencePiece vocabulary take seconds to find. Raises ModelError.
    """
    return dict(_text_files(states_of(path)))


@lru_cache(maxsize=1)
def _text_files(states: tuple[FileState, ...]) -> Mapping[str, bytes]:
    file = read_gguf(states[0].path)
    settings = {"config.json": config_of(file), "generation_config.json": generation_config_of(file)}
    return MappingProxyType(
        tokenizer_files(file) | {name: json.dumps(value).encode() for name, value in settings.items()}
    )
