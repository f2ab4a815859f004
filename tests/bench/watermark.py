"""How surely a watermark is found, how often by mistake, and what it costs: SmolLM2, at temperature 1.

    python -m tests.bench.watermark --outputs 100 --pieces 10000
    python -m tests.bench.watermark --outputs 20 --delta 1.5 --context 1

Outputs of 200 tokens, with the watermark and without, from prompts that are cut out of the interpreter's documentation
and this repository's: the share that is found with p < 1e-4, from their text, as `penstock watermark detect` reads it.
Perplexity of both is that of the model's own distribution, by the log probabilities of the tokens that were chosen.
False alarms: pieces of 200 tokens of text that people wrote (docstrings and comments of installed packages and of the
standard library, and pages in docs/), each judged by a key of its own, or all by one (`--same-key`).
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from engine import Engine, EngineConfig, Output, SamplingParams
from engine.sampling.watermark import Marks, detect, mark
from engine.text import Tokenizer
from engine.watermark import CONTEXT, DELTA, GAMMA, WatermarkKey, read_watermarks
from workers.library.reference import find_model

REPOSITORY = Path(__file__).parents[2]
FOUND = 1e-4
TOKENS = 200
PROMPT = 40


def human_texts() -> Iterator[str]:
    """Prose that people wrote, on this machine: no two texts are equal."""
    seen: set[str] = set()
    pages = [*sorted((REPOSITORY / "docs").rglob("*.md")), REPOSITORY / "LICENSE", REPOSITORY / "README.md"]
    for page in pages:
        yield page.read_text()
    places = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    for source in (file for place in places for file in sorted(place.rglob("*.py"))):
        try:
            tree = ast.parse(source.read_text())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
        for text in texts:
            if text and len(text) > 200 and text not in seen:
                seen.add(text)
                yield text


def pieces(tokenizer: Tokenizer, wanted: int) -> Iterator[list[int]]:
    """Pieces of TOKENS tokens, none of which overlap."""
    held: list[int] = []
    for text in human_texts():
        held += tokenizer.encode(text + "\n\n", add_special_tokens=False)
        while len(held) >= TOKENS:
            if not wanted:
                return
            yield held[:TOKENS]
            del held[:TOKENS]
            wanted -= 1


def perplexity(outputs: list[Output]) -> float:
    chosen = [token.logprob for output in outputs for token in output.logprobs or ()]
    return math.exp(-statistics.fmean(chosen))


def row_ms(key: WatermarkKey, vocabulary: int, rows: int = 32) -> float:
    """The least processor time (ms) that a step spends on each marked row, in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keys = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2)
    marks = Marks(list(range(rows)), keys, [key.limit] * rows, [key.delta] * rows)
    logits, times = torch.zeros(rows, vocabulary), []
    for _ in range(20):
        began = time.thread_time()
        mark(logits, marks)
        times.append(time.thread_time() - began)
    torch.set_num_threads(threads)
    return 1e3 * min(times) / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--outputs", type=int, default=100)
    parser.add_argument("--pieces", type=int, default=10_000)
    parser.add_argument("--same-key", action="store_true")
    parser.add_argument("--gamma", type=float, default=GAMMA)
    parser.add_argument("--delta", type=float, default=DELTA)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    how = parser.parse_args()
    folder = find_model(how.model).folder

    def key(number: int) -> WatermarkKey:
        return WatermarkKey("bench", number.to_bytes(32, "little"), how.gamma, how.delta, how.context)

    figures: dict[str, object] = {"gamma": how.gamma, "delta": how.delta, "context": how.context}
    tokenizer = Tokenizer.from_folder(folder)
    figures["row_ms"] = round(row_ms(key(0), tokenizer.vocab_size), 3)
    if how.pieces:
        judged = [
            detect(key(0 if how.same_key else 1 + number), piece)
            for number, piece in enumerate(pieces(tokenizer, how.pieces))
        ]
        figures |= {
            "pieces": len(judged),
            "false_alarms": sum(found.p < FOUND for found in judged),
            "below_1%": sum(found.p < 0.01 for found in judged) / len(judged),
            "least_p": min(found.p for found in judged),
        }
    if how.outputs:
        draw = random.Random(7)
        starts = [piece[:PROMPT] for piece in pieces(tokenizer, 20 * how.outputs)]
        prompts = draw.sample(starts, min(len(starts), how.outputs))
        with TemporaryDirectory() as place:
            file = Path(place, "keys.toml")
            settings = f"gamma = {how.gamma}\ndelta = {how.delta}\ncontext = {how.context}\n"
            file.write_text(f"[bench]\nsecret = 'the secret of this bench'\n{settings}")
            own = read_watermarks(file).keys["bench"]
            engine = Engine.load(folder, EngineConfig(threads=how.threads, watermark_keys=str(file)))
        by_name: dict[str | None, list[Output]] = {}
        with engine:
            for name in (None, "bench"):
                params = [
                    SamplingParams(max_tokens=how.tokens, watermark=name, seed=seed, ignore_eos=True, logprobs=0)
                    for seed in range(len(prompts))
                ]
                by_name[name] = engine.generate(prompts, params)
        for name, outputs in by_name.items():
            texts = [tokenizer.encode(output.text, add_special_tokens=False) for output in outputs]
            judged = [detect(own, text) for text in texts]
            figures |= {
                f"{'marked' if name else 'plain'}": {
                    "outputs": len(outputs),
                    "found": sum(found.p < FOUND for found in judged) / len(judged),
                    "median_z": round(statistics.median(found.z for found in judged), 2),
                    "perplexity": round(perplexity(outputs), 2),
                }
            }
    json.dump(figures, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
