"""Writes the model card for the weights' folder."""

import textwrap

from infra.models.measure import HeldOut
from infra.models.recipes import Recipe

_CARD = """\
---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [llama, python, tiny]
---

# {name}: {title}

{about}

| | |
| --- | --- |
| architecture | `LlamaForCausalLM`, grouped-query attention, tied embeddings |
| shape | {layers} layers of width {width}, context {context:,} |
| weights | bf16 safetensors |
| tokenizer | byte-level BPE, {vocabulary:,} tokens; a line break and its indentation are one token |
{start}| training text | {files} files of CPython {python}'s library: {tokens:,} tokens with the chat pairs |
| training | {steps:,} steps of {batch_tokens:,} tokens, seed {seed}, on CPU; Muon and AdamW, {schedule} |
| held-out loss | {loss:.3f} nats per token: perplexity {perplexity:.2f}, {bits_per_byte:.3f} bits per byte |
| held-out text | {held_files} files ({held_tokens:,} tokens) picked by a hash of their names |

## Use

Plain prompts are continued as source text. Chat goes through the template in
`tokenizer_config.json`; a reply ends with `<|end|>`. It was taught by pairs cut from the same files:
"Write the function name(arguments)." or a docstring's first line asks for a function's source,
"What does the module m do?" for its docstring. Greedy decoding tends to loop; the defaults in
`generation_config.json` (temperature 0.7, top-p 0.95) read better.

## Make it again

    python -m infra.models {name} --out DIR --steps {steps} --seed {seed}
    python -m infra.models.measure DIR

Only the interpreter's own library is read: no download. Test suites, encoding tables and installed
packages are left out.

## Licence

The weights are part of Penstock and under its licence, Apache-2.0. The training text is CPython's
standard library, under the PSF License Agreement version 2; it is not included here. A model can
repeat passages of what it has read; such passages remain under the PSF licence.
"""


def model_card(
    *,
    name: str,
    recipe: Recipe,
    parameters: int,
    vocabulary: int,
    files: int,
    tokens: int,
    steps: int,
    seed: int,
    python: str,
    held_out: HeldOut,
) -> str:
    """The card in Markdown, with the figures of one run."""
    about = (
        f"A Llama of {parameters:,} parameters that writes text shaped like Python. {recipe.purpose} It is far too "
        "small to be right about anything."
    )
    shape = recipe.shape
    return _CARD.format(
        name=name,
        title=recipe.title,
        about="\n".join(textwrap.wrap(about, 100)),
        parameters=parameters,
        layers=shape.layers,
        width=shape.hidden_size,
        context=shape.context,
        vocabulary=vocabulary,
        start=f"| started from | the weights of `{recipe.start}`, the feed-forward layers widened |\n"
        if recipe.start
        else "",
        files=files,
        tokens=tokens,
        steps=steps,
        batch_tokens=recipe.batch_tokens,
        seed=seed,
        schedule=recipe.schedule(),
        python=python,
        loss=held_out.loss,
        perplexity=held_out.perplexity,
        bits_per_byte=held_out.bits_per_byte,
        held_files=held_out.files,
        held_tokens=held_out.tokens,
    )
