"""The model card that is written beside the weights."""

from workers.models_train.measure import HeldOut

_CARD = """\
---
license: apache-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [llama, python, tiny]
---

# tiny: Penstock's bundled model

A Llama of {parameters:,} parameters that writes text shaped like Python. It exists so that a fresh
install serves something real, and so that tests can measure perplexity and speculation. It is far
too small to be right about anything.

| | |
| --- | --- |
| architecture | `LlamaForCausalLM`, grouped-query attention, tied embeddings, context 1,024 |
| weights | bf16 safetensors |
| tokenizer | byte-level BPE, {vocabulary:,} tokens; a line break and its indentation are one token |
| training text | {files} files of CPython {python}'s library: {tokens:,} tokens with the chat pairs |
| training | {steps:,} steps of {batch_tokens:,} tokens, seed {seed}, on CPU; Muon and AdamW, cosine to zero |
| held-out loss | {loss:.3f} nats per token: perplexity {perplexity:.2f}, {bits_per_byte:.3f} bits per byte |
| held-out text | {held_files} files ({held_tokens:,} tokens) picked by a hash of their names |

## Use

Plain prompts are continued as source text. Chat goes through the template in
`tokenizer_config.json`; a reply ends with `<|end|>`. It was taught by pairs cut from the same files:
"Write the function name(arguments)." or a docstring's first line asks for a function's source,
"What does the module m do?" for its docstring. Greedy decoding tends to loop; the defaults in
`generation_config.json` (temperature 0.7, top-p 0.95) read better.

## Make it again

    python -m workers.models_train.train_tiny --out DIR --steps {steps} --seed {seed}

Only the interpreter's own library is read: no download. Test suites, encoding tables and installed
packages are left out.

## Licence

The weights are part of Penstock and under its licence, Apache-2.0. The training text is CPython's
standard library, under the PSF License Agreement version 2; it is not included here. A model can
repeat passages of what it has read; such passages remain under the PSF licence.
"""


def model_card(
    *,
    parameters: int,
    vocabulary: int,
    files: int,
    tokens: int,
    steps: int,
    batch_tokens: int,
    seed: int,
    python: str,
    held_out: HeldOut,
) -> str:
    """The card in Markdown, with the figures of one run."""
    return _CARD.format(
        parameters=parameters,
        vocabulary=vocabulary,
        files=files,
        tokens=tokens,
        steps=steps,
        batch_tokens=batch_tokens,
        seed=seed,
        python=python,
        loss=held_out.loss,
        perplexity=held_out.perplexity,
        bits_per_byte=held_out.bits_per_byte,
        held_files=held_out.files,
        held_tokens=held_out.tokens,
    )
