"""Which GPUs are meant, and what is refused, by name; and how the driver is asked what there is."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.execution.threads import threads_of_each
from tests.workers.cli.conftest import Run, told, worker_programs
from workers.cli import cuda_devices, gpus
from workers.cli.exits import Failure
from workers.cli.gpus import Chosen, Gpu, choose, gpus_here
from workers.cli.local_pools import Plan
from workers.library import ResolvedModel
from workers.processes.supervisor import Program
from workers.settings import WorkerSettings

HERE = [
    Gpu("H200", "GPU-aa000000-0000-0000-0000-000000000000", "0"),
    Gpu("H200", "GPU-ab000000-0000-0000-0000-000000000000", "1"),
]


class TestChoose:
    @pytest.mark.parametrize(
        ("asked", "visible"),
        [
            ("all", ["0", "1"]),
            ("1", ["1"]),
            (" 1 , 0 ", ["1", "0"]),
            ("GPU-AB", ["1"]),
            (HERE[0].uuid, ["0"]),
            ("0,MIG-12345678-0000-0000-0000-000000000000", ["0", "MIG-12345678-0000-0000-0000-000000000000"]),
        ],
    )
    def test_takes_numbers_names_and_all(self, asked: str, visible: list[str]) -> None:
        assert [one.visible for one in choose(asked, HERE)] == visible

    @pytest.mark.parametrize(
        ("asked", "says"),
        [
            ("2", r"--gpus has 2; this machine has 2, numbered from 0 to 1"),
            ("0,00", "names gpu0 twice"),
            ("0,GPU-aa", "names gpu0 twice"),
            ("-1", "has '-1'; it takes all, or numbers"),
            ("0,,1", "has ''; it takes"),
            ("", "has ''; it takes"),
            ("0,all", "has 'all'; it takes"),
            ("²", "has '²'; it takes"),
            ("GPU-cc", "has GPU-cc, which is no GPU of this machine; it has GPU-aa"),
            ("GPU-a", "has GPU-a, which matches 2 GPUs"),
        ],
    )
    def test_refuses_what_it_cannot_have_by_name(self, asked: str, says: str) -> None:
        with pytest.raises(Failure, match=says):
            choose(asked, HERE)

    def test_says_where_there_is_none(self) -> None:
        with pytest.raises(Failure, match="CUDA sees no GPU on this machine"):
            choose("all", [])
        with pytest.raises(Failure, match=r"--gpus has 0; this machine has 0$"):
            choose("0", [])

    def test_ranks_are_groups(self) -> None:
        assert choose("1,0", HERE, 2) == (Chosen("gpu1-gpu0", "1,0"),)
        with pytest.raises(Failure, match=r"--gpus names 1 GPUs, which 2, a worker's .*, does not divide"):
            choose("0", HERE, 2)

    def test_labels_tell_them_apart(self) -> None:
        assert choose("GPU-ab,0", HERE) == (Chosen("gpu1", "1"), Chosen("gpu0", "0"))


class Libcuda:
    """CUDA's driver interface as ctypes has it, over two devices. `status` is what cuInit says."""

    def __init__(self, status: int = 0) -> None:
        self.status = status

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuGetErrorString(self, status: int, words: Any) -> int:
        words._obj.value = b"it broke"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, device: Any) -> int:
        assert length == len(name)
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetUuid_v2(self, digits: Any, device: Any) -> int:
        # Zero bytes in it are no end of it.
        ctypes.memmove(digits, bytes([0xA0 + device.value, *[0] * 14, 0xFF]), 16)
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:
        memory._obj.value = 150_000_000_000
        return 0


Answering = Callable[..., None]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Answering:
    """Puts a program that prints this in the place of the one that asks the driver."""

    def place(answer: str, then: str = "") -> None:
        path = tmp_path / "probe.py"
        path.write_text(f"print({answer!r})\n{then}\n")
        monkeypatch.setattr(gpus, "CUDA_DEVICES", path)

    return place


class TestTheDriver:
    def test_is_asked_for_each_device(self) -> None:
        first, second = cuda_devices.devices(Libcuda())
        assert first == {
            "name": "NVIDIA H200",
            "uuid": "GPU-a0000000-0000-0000-0000-0000000000ff",
            "memory_bytes": 150_000_000_000,
        }
        assert second["uuid"] == "GPU-a1000000-0000-0000-0000-0000000000ff"

    def test_may_have_none_or_fail(self) -> None:
        assert cuda_devices.devices(Libcuda(100)) == []
        with pytest.raises(OSError, match="cuInit: it broke"):
            cuda_devices.devices(Libcuda(999))

    def test_is_said_to_be_missing_where_it_is(self, answering: Answering) -> None:
        answering('{"error": "libcuda.so.1: no such file"}')
        with pytest.raises(Failure, match=r"--gpus needs NVIDIA's driver: libcuda\.so\.1: no such file"):
            gpus_here()

    def test_that_ends_otherwise_or_not_at_all_is_told(
        self, answering: Answering, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for then in ("raise SystemExit(3)", "print('no JSON')"):
            answering("", then)
            with pytest.raises(Failure, match="asking CUDA's driver failed"):
                gpus_here()
        answering("", "import time; time.sleep(60)")
        monkeypatch.setattr(gpus, "ANSWER_S", 0.2)
        with pytest.raises(Failure, match="did not answer within"):
            gpus_here()

    @pytest.mark.parametrize(("given", "visible"), [(None, ["0", "1"]), ("3, GPU-ff,7", ["3", "GPU-ff"])])
    def test_hands_gpus_on_by_the_names_that_we_were_given(
        self, given: str | None, visible: list[str], answering: Answering
    ) -> None:
        answering(json.dumps([{"name": "H200", "uuid": one.uuid, "memory_bytes": 1} for one in HERE]))
        environment = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
        assert [one.visible for one in gpus_here(environment)] == visible


class TestWorkerCommand:
    """`penstock worker --gpus`, up to the processes that it would supervise."""

    @pytest.fixture
    def asked(self, answering: Answering, monkeypatch: pytest.MonkeyPatch) -> list[Program]:
        answering(json.dumps([{"name": "H200", "uuid": one.uuid, "memory_bytes": 1} for one in HERE]))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        given: list[Program] = []

        async def supervise(each: list[Program], say: object, drain: float) -> int:
            given.extend(each)
            return 3

        monkeypatch.setattr("workers.cli.supervised.supervise", supervise)
        return given

    def test_says_to_each_what_it_was_told_but_for_gpu_and_name(
        self, run: Run, asked: list[Program], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said = ["--model", "x=folder", "--lease", "20.5", "--dtype", "bfloat16", "--max-num-seqs", "7"]
        ran = run(
            "worker", "--broker", "redis://:secret@h:1/0", *said, "--gpus", "1,0", "--name", "n", "--threads", "3"
        )
        assert ran.status == 3
        assert [program.name for program in asked] == ["gpu1", "gpu0"]
        assert [program.env["CUDA_VISIBLE_DEVICES"] for program in asked] == ["1", "0"]
        for program in asked:
            assert program.env["BROKER_URL"] == "redis://:secret@h:1/0"
            assert not any("secret" in word for word in program.argv)
        # What the child makes of it is what this command would have made of it, on that GPU.
        told: list[WorkerSettings] = []
        monkeypatch.setattr("workers.runtime.worker.run_worker", lambda settings, level: told.append(settings) or 0)
        for program in asked:
            with monkeypatch.context() as environment:
                for name, value in program.env.items():
                    environment.setenv(name, value)
                run(*program.argv[4:])
        engine = {"dtype": "bfloat16", "max_num_seqs": 7, "device": "cuda", "threads": 3}
        url = "redis://:secret@h:1/0"
        assert told == [WorkerSettings(url, url, "x=folder", name, engine, lease=20.5) for name in ("n.gpu1", "n.gpu0")]

    def test_shares_the_processors_out(self, run: Run, asked: list[Program]) -> None:
        run("worker", "--broker", "redis://h:1/0", "--model", "tiny", "--gpus", "all")
        threads = [program.argv[program.argv.index("--threads") + 1] for program in asked]
        assert threads == [str(threads_of_each(2))] * 2
        assert len({program.argv[-1] for program in asked}) == 2  # their names

    def test_has_several_models_share_each_of_them(
        self, run: Run, asked: list[Program], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = ["--model", "a=folder", "--model", "b=folder", "--share", "0.7", "--share", "0.3"]
        options = ["--gpus", "0,1", "--name", "n", "--health-port", "9100"]
        assert run("worker", "--broker", "redis://h:1/0", *models, *options).status == 3
        settings = [told(monkeypatch, *program.argv[4:], env=program.env) for program in asked]
        found = {
            (each.name, program.env["CUDA_VISIBLE_DEVICES"], each.health_port, each.engine["share"])
            for each, program in zip(settings, asked, strict=True)
        }
        assert found == {
            ("n.gpu0.a", "0", 9100, 0.7),
            ("n.gpu0.b", "0", 9101, 0.3),
            ("n.gpu1.a", "1", 9102, 0.7),
            ("n.gpu1.b", "1", 9103, 0.3),
        }
        pairs = {(program.name[:4], each.engine["turns"]) for each, program in zip(settings, asked, strict=True)}
        assert len(pairs) == len({folder for _, folder in pairs}) == 2, "those of a GPU take turns"
        assert {each.engine["device"] for each in settings} == {"cuda"}

    def test_has_several_models_share_parts_of_a_gpu(
        self, run: Run, asked: list[Program], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        models = ["--model", "a=folder", "--model", "b=folder", "--gpus", "MIG-GPU-11111111/7/0,MIG-GPU-11111111/8/0"]
        assert run("worker", "--broker", "redis://h:1/0", *models, "--name", "n").status == 3
        settings = [told(monkeypatch, *program.argv[4:], env=program.env) for program in asked]
        assert [each.name for each in settings[:2]] == ["n.MIG-GPU-11111111/7/0.a", "n.MIG-GPU-11111111/7/0.b"]
        assert len({each.engine["turns"] for each in settings}) == 2

    @pytest.mark.parametrize(
        "said", [["--model", "tiny", "--gpus", "all"], ["--model", "a=folder", "--model", "b=folder"]]
    )
    def test_starts_one_worker_that_waits_for_other_machines(
        self, said: list[str], run: Run, asked: list[Program], tmp_path: Path
    ) -> None:
        (tmp_path / "secret").write_bytes(b"of sixteen bytes")
        nodes = ["--tensor-parallel", "2", "--nodes", "2", "--ranks-secret", str(tmp_path / "secret")]
        ran = run("worker", "--broker", "redis://h:1/0", *said, *nodes)
        assert (ran.status, ran.out) == (2, "")
        assert "--nodes 2 goes with one worker, and this would start 2" in ran.err
        assert not asked
        assert run("worker", "--broker", "redis://h:1/0", "--model", "tiny", "--gpus", "0", *nodes).status == 3

    def test_is_not_for_a_cpu(self, run: Run, asked: list[Program]) -> None:
        ran = run("worker", "--broker", "redis://h:1/0", "--model", "tiny", "--gpus", "0", "--device", "cpu")
        assert (ran.status, ran.out) == (2, "")
        assert "--gpus goes with --device cuda" in ran.err
        assert not asked


class TestUpCommand:
    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (["--gpus", "0,2"], "--gpus has 2; this machine has 2"),
            (["--gpus", "all", "--workers", "2"], "leave --workers out"),
            (["--gpus", "all", "--min", "0", "--max", "3"], "--max is 3, and each model has 2 of the GPUs"),
            (["--gpus", "0", "--model", "tiny", "--model", "two=tiny"], "1 GPUs cannot be shared evenly by 2 models"),
            (["--gpus", "all", "--tensor-parallel", "2", "--nodes", "2"], "--nodes 2 goes with one worker, and this"),
        ],
    )
    def test_refuses_what_does_not_fit(self, run: Run, answering: Answering, said: list[str], why: str) -> None:
        answering(json.dumps([{"name": "H200", "uuid": one.uuid, "memory_bytes": 1} for one in HERE]))
        ran = run("up", *said)
        assert ran.status == 2
        assert why in ran.err

    def test_gives_each_worker_one(self, tmp_path: Path) -> None:
        models = (ResolvedModel("a", tmp_path), ResolvedModel("b", tmp_path))
        programs = worker_programs(Plan(models, tmp_path, gpus=choose("all", HERE)), {})
        assert [(one.name, one.env["CUDA_VISIBLE_DEVICES"]) for one in programs] == [
            ("worker.a.1", "0"),
            ("worker.b.1", "1"),
        ]
        assert all(one.argv[one.argv.index("--device") + 1] == "cuda" for one in programs)
