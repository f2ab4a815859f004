"""`penstock warm`: what it compiles, without a GPU, is all that serving the model asks for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.gpu.shapes import SHAPES
from infra.gpu.step_parts import part_of
from tests.engine.quant.packers import write_quantised
from tests.engine.quant.test_checkpoints import FORMS, FP8_CONFIGS
from tests.engine.quant.test_checkpoints import _fp8 as fp8
from tests.processes import ROOT
from tests.producers.gateway.conftest import TINY
from tests.workers.cli.conftest import Run

pytest.importorskip("triton")


def python(*args: str) -> subprocess.CompletedProcess[str]:
    """A process in which kernels are compiled, not interpreted."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run([sys.executable, *args], cwd=ROOT, env=env, check=False, capture_output=True, text=True)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_compiled_ahead_serves_any_step(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    asked = ("-m", "workers.cli", "warm", "tiny", "--arch", "sm_90", "--cache-dir", str(cache), "--max-num-seqs", "2")
    first = python(*asked, "--json")
    assert first.returncode == 0, first.stderr
    made = json.loads(first.stdout)
    assert (made["arch"], made["cache"], made["verified"]) == ("sm_90", str(cache), True)
    assert {"attend", "rms_norm_kernel", "rope_kv_kernel", "sampling_choose_kernel"} <= {
        one["kernel"] for one in made["kernels"]
    }
    assert not any(one["cached"] for one in made["kernels"])
    assert all((cache / one["key"]).is_dir() and one["bytes"] > 0 for one in made["kernels"])

    # Where a profile of a step (infra/gpu) puts each of them.
    assert "other" not in {part_of(one["kernel"]) for one in made["kernels"]}

    steps = python("-m", "tests.engine.warmed_steps", str(TINY), str(cache), "sm_90", "2")
    assert steps.returncode == 0, steps.stderr
    found = json.loads(steps.stdout)
    assert found["built"] == []
    assert found["steps"] == 40
    assert found["kernels"] > 10


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_compiled_ahead_is_not_compiled_again(tmp_path: Path) -> None:
    asked = ("-m", "workers.cli", "warm", "tiny", "--arch", "sm_90", "--cache-dir", str(tmp_path))
    first, again = python(*asked, "--json"), python(*asked)
    assert again.returncode == 0, again.stderr
    assert "attend" in again.stdout
    kernels = {one["kernel"] for one in json.loads(first.stdout)["kernels"]}
    assert again.stdout.count("already in the cache") == len(kernels)
    assert f"TRITON_CACHE_DIR={tmp_path}" in again.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("shape", ["llama-8b", "llama-70b"])
def test_a_ranks_share_of_large_models_compiles(tmp_path: Path, shape: str, ranks: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape] | {"num_hidden_layers": 1}))
    asked = ("--arch", "sm_90", "--cache-dir", str(tmp_path / "cache"), "--max-num-seqs", "2")
    ran = python("-m", "workers.cli", "warm", str(tmp_path), *asked, "--tensor-parallel", str(ranks), "--json")
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert made["verified"]
    assert {"attend", "join", "rope_kv_kernel", "gated_kernel", "one_row_kernel", "sampling_choose_kernel"} <= {
        one["kernel"] for one in made["kernels"]
    }


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_ranks_share_of_a_quantised_checkpoint_compiles(tmp_path: Path) -> None:
    shape = {"head_dim": 32, "intermediate_size": 128, "num_key_value_heads": 4}
    write_quantised(tmp_path, *FORMS["gptq"], dtype="bfloat16", max_position_embeddings=2048, **shape)
    asked = ("--arch", "sm_90", "--cache-dir", str(tmp_path / "cache"), "--max-num-seqs", "2", "--tensor-parallel", "2")
    ran = python("-m", "workers.cli", "warm", str(tmp_path / "packed"), *asked, "--json")
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert made["verified"]
    assert "int4_kernel" in {kernel["kernel"] for kernel in made["kernels"]}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("form", "kind"), [("gptq", "int8"), ("channel", "fp8")])
def test_quantised_checkpoints_and_compressed_keys_are_served_too(tmp_path: Path, form: str, kind: str) -> None:
    config, pack = FORMS[form] if form in FORMS else (FP8_CONFIGS[form], fp8(form))
    write_quantised(tmp_path, config, pack, dtype="bfloat16", max_position_embeddings=2048)
    model, cache = str(tmp_path / "packed"), str(tmp_path / "cache")
    asked = ("--arch", "sm_90", "--cache-dir", cache, "--max-num-seqs", "2", "--kv-cache-dtype", kind)
    made = python("-m", "workers.cli", "warm", model, *asked, "--json")
    assert made.returncode == 0, made.stderr
    own = {"gptq": "int4_kernel", "channel": "quantise_rows_kernel"}[form]
    assert own in {one["kernel"] for one in json.loads(made.stdout)["kernels"]}
    steps = python("-m", "tests.engine.warmed_steps", model, cache, "sm_90", "2", kind)
    assert steps.returncode == 0, steps.stderr
    assert json.loads(steps.stdout)["built"] == []


class TestRefusal:
    @pytest.fixture(autouse=True)
    def compiling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if nothing had told Triton to interpret: nothing is compiled here."""
        from triton import knobs

        monkeypatch.setattr(knobs.runtime, "interpret", False)

    @pytest.mark.parametrize("arch", ["h100", "sm_75", "90", "sm_9"])
    def test_of_what_is_no_architecture(self, run: Run, tmp_path: Path, arch: str) -> None:
        ran = run("warm", "tiny", "--arch", arch, "--cache-dir", str(tmp_path / "cache"))
        assert ran.status == 2
        assert f"{arch!r} is no architecture to compile for" in ran.err
        assert not (tmp_path / "cache").exists()

    def test_of_a_machine_without_a_gpu_whose_architecture_is_meant(self, run: Run, tmp_path: Path) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
        ran = run("warm", "tiny", "--cache-dir", str(tmp_path))
        assert ran.status == 2
        assert "name an architecture, such as --arch sm_90" in ran.err

    def test_of_a_model_that_cannot_be_served(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
        ran = run("warm", str(tmp_path), "--arch", "sm_90", "--cache-dir", str(tmp_path / "cache"))
        assert ran.status == 2
        assert "NoSuchModel" in ran.err

    def test_of_an_interpreter(self, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        from triton import knobs

        monkeypatch.setattr(knobs.runtime, "interpret", True)
        ran = run("warm", "tiny", "--arch", "sm_90", "--cache-dir", str(tmp_path))
        assert ran.status == 2
        assert "TRITON_INTERPRET is set" in ran.err

    def test_of_an_unknown_quantisation(self, run: Run) -> None:
        ran = run("warm", "tiny", "--arch", "sm_90", "--quantization", "int3")
        assert ran.status == 2
        assert "--quantization is 'int3'" in ran.err

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            (("--kv-cache-dtype", "int4"), "--kv-cache-dtype is 'int4'; it must be one of auto, int8, fp8"),
            (("--kv-cache-dtype", "int8", "--deterministic"), "with --deterministic is for CPUs"),
            (("--kv-cache-dtype", "fp8", "--arch", "sm_80"), "sm_80 has no 8-bit floats"),
            (("--quantization", "fp8", "--arch", "sm_86"), "sm_86 has no 8-bit floats"),
        ],
    )
    def test_of_keys_and_values_that_are_not_served(
        self, run: Run, tmp_path: Path, asked: tuple[str, ...], said: str
    ) -> None:
        ran = run("warm", "tiny", "--arch", "sm_90", "--cache-dir", str(tmp_path / "cache"), *asked)
        assert ran.status == 2
        assert said in ran.err
        assert not (tmp_path / "cache").exists()

    def test_of_a_quantised_checkpoint_without_its_files(self, run: Run, tmp_path: Path) -> None:
        write_quantised(tmp_path, *FORMS["gptq"])
        (tmp_path / "packed" / "model.safetensors").unlink()
        ran = run("warm", str(tmp_path / "packed"), "--arch", "sm_90", "--cache-dir", str(tmp_path / "cache"))
        assert ran.status == 2
        assert "neither model.safetensors nor" in ran.err

    def test_of_a_machine_without_pythons_headers(
        self, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CC", "false")  # what a compiler does that finds no Python.h
        ran = run("warm", "tiny", "--arch", "sm_90", "--cache-dir", str(tmp_path))
        assert ran.status == 2
        assert "a compiler and Python's headers (Debian, Ubuntu: gcc python3-dev)" in " ".join(ran.err.split())
