"""What kernels take of an H200, as compiled for it: nothing spills, all fits, and loads overlap with products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900)]

#: Of one block, in bytes (CUDA C++ Programming Guide, technical specifications, compute capabilities 9.0 and 8.9).
MOST_SHARED = 232_448
MOST_SHARED_ADA = 101_376

Built = dict[str, list[dict[str, Any]]]


@cache
def built(group: str) -> Built:
    """Compiles a group in a process of its own. Returns what its kernels take, by the name of what launches them."""
    command = [sys.executable, "-m", "tests.engine.kernels.triton.builds", group]
    ran = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "0"}, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found: Built = json.loads(ran.stdout)[group]
    return found


@pytest.fixture(params=["attention, 8b", "attention"])
def attention(request: pytest.FixtureRequest) -> Built:
    return built(f"sm_90:{request.param}")


def test_decodes_over_a_cache_of_8_bits_spill_nothing_and_load_two_tiles_at_once() -> None:
    decodes, wider = built("sm_90:decodes, 8 bits"), built("sm_90:attention, 8b")
    assert decodes.keys() == {"int8", "fp8"}
    for name, (decode, *_) in decodes.items():
        assert (decode["kernel"], decode["stack"]) == ("attend", 0), name
        assert decode["copies left on their way"] >= 2, name
        # Less than that of bf16, whose tiles are twice as large.
        assert decode["shared"] < wider["llama-3.1-8b"][0]["shared"], name
    # A row of int8 has its scale behind it, and begins at a multiple of four bytes.
    assert decodes["fp8"][0]["copies of 16 bytes"] > 0


def test_nothing_spills_and_all_fits(attention: Built) -> None:
    for name, kernels in attention.items():
        # Decodes, prompts, and what joins the parts of either.
        assert [kernel["kernel"] for kernel in kernels] == ["attend", "join", "attend", "join"]
        for kernel in kernels:
            assert kernel["stack"] == 0, (name, kernel)
            assert kernel["shared"] <= MOST_SHARED, (name, kernel)


def test_keys_and_values_of_two_tiles_are_on_their_way_at_once(attention: Built) -> None:
    for name, kernels in attention.items():
        for kernel in kernels:
            if kernel["kernel"] == "attend":
                assert kernel["copies of 16 bytes"] > 0, (name, kernel)
                assert kernel["copies left on their way"] == 2, (name, kernel)


def test_prompts_are_multiplied_by_warpgroups_and_several_decodes_fit_beside_each_other(attention: Built) -> None:
    for name, (decode, _, prompt, _) in attention.items():
        assert prompt["wgmma"], name
        assert prompt["registers"] * prompt["warps"] * 32 <= 1 << 16, name
        # Three, as the tables in attention.py say; each takes 1 KiB more than its own.
        assert 3 * (decode["shared"] + 1024) <= MOST_SHARED + 1024, name
        assert 3 * decode["registers"] * decode["warps"] * 32 <= 1 << 16, name


def test_kernels_of_layers_are_compiled_once_and_read_16_bytes_at_a_time() -> None:
    layers = built("sm_90:layers")
    once = ["rms_norm_kernel", "add_rms_norm_kernel", "gated_kernel", "rope_kv_kernel"]
    kernels = [kernel["kernel"] for kernel in layers["llama-3.1-8b"]]
    # However many tokens; activations are quantised at two widths.
    assert sorted(kernels) == sorted([*once, "quantise_rows_kernel", "quantise_rows_kernel"])
    for name, found in layers.items():
        for kernel in found:
            assert kernel["stack"] == 0, (name, kernel)
            assert name == "tiny" or kernel["accesses of 16 bytes"] >= 3, (name, kernel)


def test_weights_are_dequantised_in_registers_while_others_are_on_their_way() -> None:
    for name, found in built("sm_90:products").items():
        products = [kernel for kernel in found if kernel["kernel"] in ("int4_kernel", "int8_kernel")]
        assert len(products) == 3, name
        for kernel in found:
            assert kernel["stack"] == 0, (name, kernel)
            assert kernel["shared"] <= MOST_SHARED, (name, kernel)
            assert kernel["registers"] * kernel["warps"] * 32 <= 1 << 16, (name, kernel)
        for kernel in products:
            assert kernel["wgmma"], (name, kernel)
            # Of two or three operands, two rounds ahead.
            assert kernel["copies left on their way"] >= 4, (name, kernel)


def test_a_single_rows_product_reads_16_bytes_at_a_time() -> None:
    for name, (kernel,) in built("sm_90:one row").items():
        assert kernel["stack"] == 0, (name, kernel)
        assert kernel["accesses of 16 bytes"] >= 2, (name, kernel)


def test_deterministic_kernels_spill_nothing_and_multiply_by_warpgroups_but_for_wide_heads() -> None:
    for name, kernels in built("sm_90:fixed").items():
        assert len(kernels) >= 3, name
        for kernel in kernels:
            assert kernel["stack"] == 0, (name, kernel)
            assert kernel["shared"] <= MOST_SHARED, (name, kernel)
            wide_heads = name == "gemma-2-9b"
            wanted = kernel["kernel"] in ("attend_fixed", "product_kernel") and not wide_heads
            assert kernel["wgmma"] == wanted, (name, kernel)


def test_kernels_of_experts_spill_nothing_and_read_weights_ahead() -> None:
    found = built("sm_90:experts")
    first = [kernel["kernel"] for kernel in found["mixtral-8x7b"]]
    # Of few places and of many; gate and up, and down.
    assert sorted(first) == sorted(["route_kernel", "sort_kernel", *["experts_kernel"] * 4, "sum_kernel"])
    for name, kernels in found.items():
        for kernel in kernels:
            assert kernel["stack"] == 0, (name, kernel)
            assert kernel["shared"] <= MOST_SHARED, (name, kernel)
            if kernel["kernel"] == "experts_kernel":
                assert kernel["wgmma"], (name, kernel)
                assert kernel["copies of 16 bytes"] > 0, (name, kernel)
                assert kernel["copies left on their way"] >= 2, (name, kernel)


def test_a_gpu_with_less_shared_memory_has_kernels_too() -> None:
    kernels = built("sm_89:attention, 8b")["llama-3.1-8b"]
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= MOST_SHARED_ADA, kernel


def test_sampling_spills_nothing(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    env["TRITON_INTERPRET"] = "0"
    command = [sys.executable, "-m", "tests.engine.kernels.triton.compile_sampling", str(tmp_path)]
    ran = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    builds = json.loads(ran.stdout)
    assert {build["kernel"] for build in builds} == {
        "sampling_edit_kernel",
        "sampling_filter_kernel",
        "sampling_choose_kernel",
        "sampling_settle_kernel",
    }
    for build in builds:
        assert {"STACK:0", "LOCAL:0"} <= set(build["usage"]), build
