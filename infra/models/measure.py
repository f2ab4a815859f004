"""Measures perplexity on files that training has not seen.

python -m infra.models.measure workers/models/tiny workers/models/tiny-v2
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from infra.models.folder import read_folder
from infra.models.llama import Llama
from infra.models.tokenizer import END_OF_TEXT_ID
from workers.library.corpus import SourceFile, standard_library


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The held-out loss in nats per token, and the size of the text in files, tokens and UTF-8 bytes."""

    loss: float
    files: int
    tokens: int
    text_bytes: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.loss * self.tokens / self.text_bytes / math.log(2)

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3f}, perplexity {self.perplexity:.2f}, {self.bits_per_byte:.3f} bits per byte "
            f"({self.files} files, {self.tokens:,} tokens)"
        )


@torch.no_grad()
def held_out_loss(model: Llama, files: list[SourceFile], tokenizer: Tokenizer) -> HeldOut:
    """The mean loss over every token of `files`, each file in windows of the model's whole context."""
    nats, tokens = 0.0, 0
    for file in files:
        ids = torch.tensor([END_OF_TEXT_ID, *tokenizer.encode(file.text, add_special_tokens=False).ids])
        for start in range(0, len(ids) - 1, model.shape.context):
            window = ids[start : start + model.shape.context + 1]
            nats += model.loss(window[None]).item() * (len(window) - 1)
            tokens += len(window) - 1
    text_bytes = sum(len(file.text.encode()) for file in files)
    return HeldOut(loss=nats / tokens, files=len(files), tokens=tokens, text_bytes=text_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.models.measure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    torch.set_num_threads(1)
    files = [file for file in standard_library() if file.held_out]
    for folder in parser.parse_args().folders:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        print(f"{folder.name}: {held_out_loss(read_folder(folder), files, tokenizer)}", flush=True)


if __name__ == "__main__":
    main()
