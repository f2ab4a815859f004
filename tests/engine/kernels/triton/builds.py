"""Kernels compiled for a GPU, and what they take of it, as JSON by group: python -m ... ARCH:GROUP ...

A process of its own, since Triton chooses when it is imported whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from triton import knobs

from engine.kernels import RaggedBatch
from engine.kernels.reference import SCALE_BYTES
from engine.kernels.triton.ahead import Build, compiling_for
from engine.kernels.triton.attention.compressed_kv import INT8, KINDS, PLAIN
from engine.kernels.triton.attention.fixed import FixedAttention
from engine.kernels.triton.attention.paged import PagedAttention
from engine.kernels.triton.experts import GroupedProduct, add_shares, route, sort
from engine.kernels.triton.products.one_row import one_row_product
from engine.kernels.triton.products.product import product
from tests.engine.kernels.triton.launches import LAYERS, PRODUCTS, empty


def _attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float | None = None,
    kind: type[PagedAttention] | type[FixedAttention] = PagedAttention,
    kv_cache_dtype: str = "auto",
    only_decodes: bool = False,
) -> Callable[[], None]:
    """What a model of that shape launches: in steps of decodes alone, and of prompts too."""

    def launch() -> None:
        attention = kind()
        stored = KINDS[kv_cache_dtype]
        width = head_dim + SCALE_BYTES if stored == INT8 else head_dim
        cache_dtype = dtype if stored == PLAIN else torch.uint8
        cache = torch.empty(2, 1000, 16, kv_heads, width, dtype=cache_dtype, device="meta")
        more = {} if kind is FixedAttention else {"kind": stored}
        # Of many tokens, deterministic attention divides no walk.
        steps = ((4, 1), (60, 57)) if kind is PagedAttention else ((4, 1), (3000, 57))
        for tokens, most_queries in steps[:1] if only_decodes else steps:
            starts, lens, rows = (torch.empty(n, dtype=torch.int32, device="meta") for n in (5, 4, 4))
            tables = torch.empty(64, 600, dtype=torch.int32, device="meta")
            slots = torch.empty(tokens, dtype=torch.int64, device="meta")
            query = torch.empty(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, device="meta")[:, :heads]
            positions = torch.empty(tokens, dtype=torch.int64, device="meta")
            batch = RaggedBatch(
                slots, starts, lens, tables, rows, most_queries, most_places=9000, window=window, positions=positions
            )
            attention(query, cache, batch, head_dim**-0.5, softcap, **more)

    return launch


#: What must fit: the shape that figures are given for, the smallest, and one with all there is.
LAUNCHES = {
    "llama-3.1-8b": _attention(32, 8, 128),
    "tiny": _attention(4, 2, 16),
    "gemma-2-9b": _attention(16, 8, 256, window=4096, softcap=50.0),
}


def _fixed_products(outputs: int, inputs: int) -> Callable[[], None]:
    """In deterministic mode: of few rows and of many, in half precision and in 8 bits."""

    def launch() -> None:
        for rows in (4, 1000):
            product(empty(rows, inputs), empty(outputs, inputs), empty(outputs), torch.bfloat16)
            eight = (empty(n, inputs, dtype=torch.float8_e4m3fn) for n in (rows, outputs))
            scales = (empty(rows, dtype=torch.float32), empty(outputs, dtype=torch.float32))
            product(*eight, None, torch.bfloat16, scales)

    return launch


FIXED = {
    "llama-3.1-8b": _attention(32, 8, 128, kind=FixedAttention),
    "tiny-v2": _attention(6, 2, 32, kind=FixedAttention),
    "gemma-2-9b": _attention(16, 8, 256, window=4096, softcap=50.0, kind=FixedAttention),
    "products": _fixed_products(4096, 4096),
}


def _one_row(inputs: int, dtype: torch.dtype = torch.bfloat16) -> Callable[[], None]:
    def launch() -> None:
        scales = None if dtype == torch.bfloat16 else empty(4096, 1, dtype=torch.float32)
        one_row_product(empty(1, inputs), empty(4096, inputs, dtype=dtype), None, scales)

    return launch


ONE_ROW = {
    "bf16": _one_row(4096),
    "bf16, masked": _one_row(14336 + 8),
    "fp8": _one_row(4096, torch.float8_e4m3fn),
    "fp8, masked": _one_row(14336, torch.float8_e4m3fn),
}
#: Over a cache of 8 bits; those of prompts take long to compile.
EIGHT_BITS = {kind: _attention(32, 8, 128, kv_cache_dtype=kind) for kind in ("int8", "fp8")}
DECODES = {kind: _attention(32, 8, 128, kv_cache_dtype=kind, only_decodes=True) for kind in EIGHT_BITS}


def _experts(count: int, chosen: int, width: int, inner: int) -> Callable[[], None]:
    """Of few rows and of many."""

    def launch() -> None:
        products = [GroupedProduct([empty(*shape)] * count) for shape in ((2 * inner, width), (width, inner))]
        for rows in (4, 3000):
            order, starts = sort(route(empty(rows, count), chosen, True)[0], count)
            inside = empty(rows * chosen, inner)
            products[0](empty(rows, width), order, starts, chosen)
            add_shares(products[1](inside, order, starts), empty(rows, chosen, dtype=torch.float32))

    return launch


EXPERTS = {
    "mixtral-8x7b": _experts(8, 2, 4096, 14336),
    "qwen3-30b-a3b": _experts(128, 8, 2048, 768),
    "uneven": _experts(5, 3, 96, 48),
}
GROUPS = {
    "experts": EXPERTS,
    "8 bits": EIGHT_BITS,
    "fixed": FIXED,
    "attention": LAUNCHES,
    "decodes, 8 bits": DECODES,
    "attention, 8b": {"llama-3.1-8b": LAUNCHES["llama-3.1-8b"]},
    "layers": LAYERS,
    "one row": ONE_ROW,
    "products": PRODUCTS,
}


def described(build: Build) -> dict[str, Any]:
    ran = subprocess.run(
        [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", build.binary], check=True, capture_output=True, text=True
    )
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", ran.stdout)
    assert usage is not None, ran.stdout
    ptx = build.binary.with_suffix(".ptx").read_text()
    return {
        "kernel": build.kernel,
        "registers": int(usage[1]),
        # Spilled registers and arrays of a thread.
        "stack": int(usage[2]) + int(usage[3]),
        "shared": build.shared,
        "warps": build.warps,
        "wgmma": "wgmma.mma_async" in ptx,
        "accesses of 16 bytes": len(re.findall(r"(?:ld|st)\.global[.\w:]*\.v4\.b32", ptx)),
        "copies of 16 bytes": len(re.findall(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", ptx)),
        "copies left on their way": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=0),
    }


def built(cache: Path, arch: str, group: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    with compiling_for(arch, cache) as builds:
        for name, launch in GROUPS[group].items():
            before = len(builds)
            launch()
            found[name] = [described(build) for build in builds[before:]]
    return found


def _asked(text: str) -> str:
    arch, _, group = text.partition(":")
    if not arch or group not in GROUPS:
        raise argparse.ArgumentTypeError(f"{text!r} is not ARCH:GROUP, with one of the groups {', '.join(GROUPS)}")
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", type=_asked, metavar="ARCH:GROUP", help=f"of {', '.join(GROUPS)}")
    groups = parser.parse_args().groups
    # One cache: what is compiled in C beside the kernels is the same for all.
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({asked: built(Path(folder), *asked.split(":")) for asked in groups}))
