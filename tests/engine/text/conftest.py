"""Little tokenizers of each common make, trained on the standard library's own source."""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<|begin|>", "<|end|>"]
# Every byte, as the fallback of tokenizers that know only some characters.
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def lines() -> list[str]:
    sources = [Path(module.__file__).read_text(encoding="utf-8") for module in (argparse, textwrap)]
    return "".join(sources).splitlines(keepends=True)


@pytest.fixture(scope="session")
def byte_level() -> tokenizers.Tokenizer:
    """As Llama 3 and Qwen: byte-level BPE, BOS added by the post-processor, an added token with a space in it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines(), trainer)
    tokenizer.add_tokens([AddedToken("<think> ｜é", special=False), AddedToken("<tool>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer


@pytest.fixture(scope="session")
def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: SentencePiece's underscores, bytes for unknown characters, one leading space dropped."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *SPECIAL, *BYTES], show_progress=False)
    tokenizer.train_from_iterator(["".join(lines())[:20000]], trainer)
    # They had to be trained in as special tokens, which would be skipped; a byte is an ordinary token.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="session")
def metaspace() -> tokenizers.Tokenizer:
    """As T5 and XLM-R: a unigram model whose words begin with an underscore."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(lines()[:800], trainer)
    return tokenizer


@pytest.fixture(scope="session")
def word_piece() -> tokenizers.Tokenizer:
    """As BERT: pieces inside a word begin with ##."""
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    tokenizer.train_from_iterator(lines()[:800], trainer)
    return tokenizer
