"""Train the bundled model `tiny` on this interpreter's standard library.

    python -m workers.models_train.train_tiny --out DIR

The default 2,400 steps of 2,048 tokens take about half an hour on one AVX2 core. A run is
reproducible on the same machine, library and number of threads; elsewhere, sums of floats in
another order give a different model of the same quality.
"""

import argparse
import math
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from workers.models_train.card import model_card
from workers.models_train.corpus import SourceFile, chat_pairs, standard_library
from workers.models_train.folder import write_folder
from workers.models_train.llama import Llama, Shape
from workers.models_train.measure import held_out_loss
from workers.models_train.muon import Muon
from workers.models_train.tokenizer import END_OF_TEXT_ID, chat_text, train_tokenizer

_BATCH_TOKENS = 2048
#: Gradients are summed over parts of this size: it is faster, since activations stay in the cache.
_PART_TOKENS = 1024
#: Attention over short windows is cheaper; the last steps teach the positions up to the full context.
_SHORT_WINDOW, _SHORT_SHARE = 256, 0.7
#: Found by short runs; the tied embedding, which Adam trains, wants a far higher rate than is usual.
_MUON_RATE, _ADAM_RATE = 0.02, 0.02
_WARM_UP_SHARE = 0.025


def documents(files: list[SourceFile], tokenizer: Tokenizer, seed: int) -> list[Tensor]:
    """Token ids of every training file and chat pair, each opened by the end-of-text token."""
    rng = random.Random(seed)  # noqa: S311 - it shuffles, it guards nothing
    texts = [file.text for file in files]
    for file in files:
        texts += [chat_text(pair.system, pair.user, pair.assistant) for pair in chat_pairs(file, rng)]
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [torch.tensor([END_OF_TEXT_ID, *encoding.ids]) for encoding in encoded]


def batches(texts: list[Tensor], length: int, random_state: torch.Generator) -> Iterator[Tensor]:
    """Endless `[_BATCH_TOKENS / length, length + 1]` windows; each pass reads all texts in a new order."""
    rows = _BATCH_TOKENS // length
    while True:
        order = torch.randperm(len(texts), generator=random_state).tolist()
        stream = torch.cat([texts[i] for i in order])
        windows = stream.unfold(0, length + 1, length)
        shuffled = torch.randperm(len(windows), generator=random_state)
        for start in range(0, len(windows), rows):
            yield windows[shuffled[start : start + rows]]


def train(model: Llama, texts: list[Tensor], steps: int, seed: int) -> None:
    """Train in place: warm-up, then a cosine to zero; short windows first, the full context last."""
    random_state = torch.Generator().manual_seed(seed)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    short_steps, warm_up = round(steps * _SHORT_SHARE), max(1, round(steps * _WARM_UP_SHARE))
    source = batches(texts, _SHORT_WINDOW, random_state)
    started, smooth = time.monotonic(), math.log(model.shape.vocab_size)
    for step in range(steps):
        if step == short_steps:
            source = batches(texts, model.shape.context, random_state)
        batch = next(source)
        total = 0.0
        for part in batch.chunk(_BATCH_TOKENS // _PART_TOKENS):
            loss = model.loss(part) * (len(part) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves Tensor.backward unannotated
            total += loss.item()
        scale = min((step + 1) / warm_up, 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in adam.param_groups:
            group["lr"] = _ADAM_RATE * scale
        adam.step()
        muon.step(_MUON_RATE * scale)
        model.zero_grad()
        smooth += (total - smooth) * max(0.02, 1 / (step + 1))
        if (step + 1) % 50 == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            print(f"step {step + 1}/{steps}  loss {smooth:.3f}  {seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--steps", type=int, default=2400, help=f"of {_BATCH_TOKENS} tokens each")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    files = standard_library()
    training = [file for file in files if not file.held_out]
    tokenizer = train_tokenizer(file.text for file in training)
    texts = documents(training, tokenizer, arguments.seed)
    model = Llama(Shape())
    parameters = sum(p.numel() for p in model.parameters())
    tokens = sum(len(text) for text in texts)
    print(f"{parameters:,} parameters, {len(training)} files, {tokens:,} tokens", flush=True)

    train(model, texts, arguments.steps, arguments.seed)
    model.to(torch.bfloat16).to(torch.float32)  # what is measured is what is saved
    result = held_out_loss(model, [file for file in files if file.held_out], tokenizer)
    print(f"held out: {result}", flush=True)
    card = model_card(
        parameters=parameters,
        vocabulary=tokenizer.get_vocab_size(),
        files=len(training),
        tokens=tokens,
        steps=arguments.steps,
        batch_tokens=_BATCH_TOKENS,
        seed=arguments.seed,
        python=platform.python_version(),
        held_out=result,
    )
    write_folder(arguments.out, model, tokenizer, card)


if __name__ == "__main__":
    main()
