"""Train a bundled model on this interpreter's standard library.

    python -m infra.models tiny-draft --out DIR
    python -m infra.models tiny-v2 --out DIR --checkpoint FILE --steps 4000

`tiny`'s 2,400 steps take about half an hour on one AVX2 core. With a checkpoint, a stopped run continues where it
was. If the recipe's rate is constant at first, it may continue to another number of steps.
"""

import argparse
import platform
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

from infra.models.card import model_card
from infra.models.folder import read_folder, write_folder
from infra.models.grow import widened
from infra.models.llama import Llama
from infra.models.measure import held_out_loss
from infra.models.recipes import RECIPES
from infra.models.tokenizer import train_tokenizer
from infra.models.train import Checkpoint, documents, train
from workers.library.corpus import standard_library

_BUNDLED = Path(__file__).parents[2] / "workers" / "models"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m infra.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model into")
    parser.add_argument("--steps", type=int, help="number of steps (default: the recipe's)")
    parser.add_argument("--checkpoint", type=Path, help="file to save the run in, and to continue from")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    recipe = RECIPES[arguments.name]
    steps = arguments.steps or recipe.steps

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    files = standard_library()
    training = [file for file in files if not file.held_out]
    if recipe.tokenizer is None:
        tokenizer = train_tokenizer(file.text for file in training)
    else:
        tokenizer = Tokenizer.from_file(str(_BUNDLED / recipe.tokenizer / "tokenizer.json"))
    texts = documents(training, tokenizer, arguments.seed)
    model = Llama(recipe.shape)
    if recipe.start is not None:
        model = widened(read_folder(_BUNDLED / recipe.start), recipe.shape)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = sum(len(text) for text in texts)
    _say(f"{parameters:,} parameters, {len(training)} files, {tokens:,} tokens")

    checkpoint = Checkpoint(arguments.checkpoint) if arguments.checkpoint else None
    try:
        train(model, texts, recipe, steps, arguments.seed, checkpoint, _say)
    except ValueError as error:
        sys.exit(str(error))
    model.to(torch.bfloat16).to(torch.float32)  # measure the weights as they are saved
    result = held_out_loss(model, [file for file in files if file.held_out], tokenizer)
    _say(f"held out: {result}")
    card = model_card(
        name=arguments.name,
        recipe=recipe,
        parameters=parameters,
        vocabulary=tokenizer.get_vocab_size(),
        files=len(training),
        tokens=tokens,
        steps=steps,
        seed=arguments.seed,
        python=platform.python_version(),
        held_out=result,
    )
    write_folder(arguments.out, model, tokenizer, card)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
