"""The command line of the bench and its peer, checked before anything is measured."""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.bench.load import MIXES
from engine.config import EngineConfig
from engine.declared import Flag, Integer, Number, OneOf, declared

#: The engine's settings that are options here, each by its own name. The others follow from the workload.
SETTINGS = tuple(name for name in declared(EngineConfig) if name not in ("max_num_seqs", "max_model_len", "seed"))
#: Those of the peer, too.
ALIKE = ("kv_cache_dtype", "quantization", "dtype", "device", "threads")
WORKLOADS = ("W1", "W8", "W32", "W64mix")


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that this bench and its peer have in common."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument(
        "--workload",
        type=partial(_listed, WORKLOADS),
        default="W1,W8,W32,W64mix",
        help="one or several, separated by commas",
    )
    for name in ALIKE:
        _add(parser, name)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--repeats", type=_count, default=2, help="runs of each workload; the best counts")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--json", type=_file, default=None, help="write all figures to this file")
    return parser


def every_argument(description: str | None = None) -> argparse.ArgumentParser:
    parser = arguments(description)
    for name in SETTINGS:
        if name not in ALIKE:
            _add(parser, name)
    parser.add_argument("--peer", choices=["transformers-cb"], default=None)
    parser.add_argument("--peer-dtype", choices=["float32", "bfloat16", "float16"], default=None)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--breakdown", action="store_true", help="time the parts of steps instead of throughput")
    instead.add_argument("--load", action="store_true", help="measure latency by rate of arrival instead of throughput")
    parser.add_argument(
        "--mix",
        type=partial(_listed, MIXES),
        default="chat,prefix,long,tiers",
        help="with --load: mixes, separated by commas",
    )
    parser.add_argument(
        "--rates", type=_rates, default="0.5,1,2,4", help="with --load: requests a second, separated by commas"
    )
    parser.add_argument("--requests", type=_count, default=60, help="with --load: requests for each rate")
    return parser


def checked(parser: argparse.ArgumentParser, argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the process's own argv. Ends the process with a reason if options do not go together."""
    args = parser.parse_args(argv)
    if args.peer is not None and (args.load or args.breakdown):
        parser.error("--peer is compared by throughput, and not with --load or --breakdown")
    if args.breakdown and max(args.tensor_parallel, args.pipeline_parallel) > 1:
        parser.error("--breakdown times the parts of one process, not with --tensor-parallel or --pipeline-parallel")
    if args.peer is not None and find_spec("transformers") is None:
        parser.error(f"--peer {args.peer} needs transformers, which is not installed")
    return args


def _add(parser: argparse.ArgumentParser, name: str) -> None:
    """Add an engine's setting. The engine itself checks numbers."""
    setting = declared(EngineConfig)[name]
    how: dict[str, Any] = {"default": setting.default, "help": setting.option.help if setting.option else None}
    match setting.bound:
        case Flag():
            how["action"] = argparse.BooleanOptionalAction
        case OneOf() as bound:
            how["choices"] = bound.choices
        case Integer():
            how["type"] = int
        case Number():
            how["type"] = float
    parser.add_argument(f"--{name.replace('_', '-')}", **how)


def _listed(choices: tuple[str, ...], text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in choices:
            raise argparse.ArgumentTypeError(f"{name!r} is not known; there are {', '.join(choices)}")
    return names


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no numbers with commas between them") from None
    if not all(0 < rate < math.inf for rate in rates):
        raise argparse.ArgumentTypeError(f"rates are finite and above 0, and {text} has one that is not")
    return rates


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of 1 or more")
    return int(text)


def _file(text: str) -> Path:
    """A path that can be written. It is checked early, so that no figures are lost after minutes of measuring."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise argparse.ArgumentTypeError(f"{text} {reason}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} may not be written")
    return path
