"""Options that several commands have, each with one meaning and one help text."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(envvar="PENSTOCK_URL", help="Where the gateway is.")]
MaxTokens = Annotated[int | None, typer.Option(help="Longest output; unset: as far as the context goes.")]
MinTokens = Annotated[int | None, typer.Option(help="Shortest output.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; unset: the model's own.")]
TopK = Annotated[int | None, typer.Option(help="Sample from this many tokens; 0: all.")]
TopP = Annotated[float | None, typer.Option(help="Sample from this much probability.")]
MinP = Annotated[float | None, typer.Option(help="Leave out what is less likely than this share of the likeliest.")]
TypicalP = Annotated[float | None, typer.Option(help="Sample from this much probability of the least surprising.")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: tokens that were there before are less likely.")
]
PresencePenalty = Annotated[float | None, typer.Option(help="Above 0: less likely once they were written.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Above 0: less likely each time they were written.")]
Seed = Annotated[int | None, typer.Option(help="Makes the output repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own end.")]
Outputs = Annotated[int | None, typer.Option("-n", help="How many outputs.")]
DType = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None,
    typer.Option(help="none, or fp8: weights and activations in 8 bits, on CUDA from compute capability 8.9."),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="Output that depends on no neighbour, chunk or interruption, to the bit; slower."
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Gpus = Annotated[
    str | None,
    typer.Option(help="One process for each of these GPUs: all, or numbers, GPU-... and MIG-... names, as in 0,1."),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads; unset: torch's choice.")]
