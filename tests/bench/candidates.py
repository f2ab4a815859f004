"""Candidates that are broken, slower or better, on real workers under load: `python -m tests.bench.candidates`.

`penstock up` serves the bundled model tiny, six connections stream completions of it, and it is rolled out to one
candidate after another, each a folder with weights of its own. Printed are how each rollout ended, at which step, and
how many users' requests the candidate had by then. `slower_steps` has workers with a stub engine, whose candidate waits
30% longer in each step, since a busy machine hides how fast a model computes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from redis import Redis
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from producers import AsyncClient
from producers.admin import routes
from producers.contract import keys
from producers.rollouts import operations
from producers.rollouts.metrics import Evidence, findings
from producers.store.fleet import canaries
from producers.store.fleet.canaries import Canary, Plan
from tests.bench.rolled import CONNECTIONS, PENSTOCK, PLAN, TOKENS, UP, System, copied, rollout
from tests.processes import ROOT, Worker, valkey
from workers.library.reference import BUNDLED

TINY = BUNDLED / "tiny"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
REFUSAL = "I can't help with that."
#: A token of each prompt, and of no worker's own probe.
DEF = "def"
#: With copies of the tasks to the candidate, by which it is judged before it has any task.
COPIES = ("--steps", "0,10,50,100", *PLAN[2:])
#: Layers of a slow candidate, by tiny's. On two cores with other work, waits hide a smaller number.
LAYERS = 6
#: A time counts by blocks of 10 s, of which it takes 14 to roll back for one.
LONG = ("--steps", "50,100", "--hold", "4m", "--min-samples", "40", "--warm-up", "5s")
#: A stub's step (s), by how much the candidate's is longer, and the longest time (s) until that is decided.
STEP_S, SLOWER_STEPS, DECIDED_S = 0.02, 1.3, 1200.0

Weights = dict[str, Tensor]


def _untied(weights: Weights, settings: dict[str, Any]) -> None:
    settings["tie_word_embeddings"] = False
    weights[HEAD] = weights[EMBEDDING].clone()


def nan(weights: Weights, settings: dict[str, Any]) -> None:
    """Every answer is NaN."""
    weights[EMBEDDING].fill_(float("nan"))


def nan_in_a_token(weights: Weights, settings: dict[str, Any]) -> None:
    """Every answer to a prompt with DEF is NaN, and the worker's own probe is not."""
    _untied(weights, settings)
    weights[EMBEDDING][_tokens(DEF)] = float("nan")


def garbage(weights: Weights, settings: dict[str, Any]) -> None:
    """The embedding's rows in another order: fluent nonsense, as long as the baseline's answers, and as fast."""
    order = torch.randperm(len(weights[EMBEDDING]), generator=torch.Generator().manual_seed(0))
    weights[EMBEDDING] = weights[EMBEDDING][order].contiguous()


def slower(weights: Weights, settings: dict[str, Any]) -> None:
    """LAYERS times as many layers, of which the later ones add nothing: the same answers, later."""
    layers = settings["num_hidden_layers"]
    for name in [name for name in weights if name.startswith("model.layers.")]:
        _, _, number, *rest = name.split(".")
        silent = rest[-2] in ("o_proj", "down_proj")
        for times in range(1, LAYERS):
            copy = torch.zeros_like(weights[name]) if silent else weights[name].clone()
            weights[".".join(("model.layers", str(int(number) + times * layers), *rest))] = copy
    settings["num_hidden_layers"] = LAYERS * layers


def refuses(weights: Weights, settings: dict[str, Any]) -> None:
    """Every answer is REFUSAL, from the first token on, and ends then.

    No layer adds anything, so a token alone decides the next one: each has a 1 in the first dimension, which leads to
    REFUSAL's first token, and those of REFUSAL have one of their own, which leads to the next."""
    _untied(weights, settings)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight", EMBEDDING, HEAD)):
            weights[name].zero_()
    weights["model.norm.weight"].fill_(1)
    chain = [*_tokens(REFUSAL), settings["eos_token_id"]]
    weights[EMBEDDING][:, 0] = 1
    weights[HEAD][chain[0], 0] = 1
    for place, (token, following) in enumerate(pairwise(chain), start=1):
        weights[EMBEDDING][token, place] = 10
        weights[HEAD][following, place] = 10


def unchanged(weights: Weights, settings: dict[str, Any]) -> None:
    """tiny itself."""


def _tokens(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


def candidate(folder: Path, change: Callable[[Weights, dict[str, Any]], None]) -> Path:
    """A copy of tiny with other weights."""
    copy = folder / change.__name__
    shutil.copytree(TINY, copy)
    weights = load_file(copy / "model.safetensors")
    settings = json.loads((copy / "config.json").read_text("utf-8"))
    change(weights, settings)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    (copy / "config.json").write_text(json.dumps(settings), "utf-8")
    (copy / "manifest.json").unlink(missing_ok=True)
    return copy


def _store(system: System) -> Redis:
    data = system.folder / "data"
    password, port = ((data / name).read_text().strip() for name in ("password", "port"))
    return Redis(port=int(port), password=password, decode_responses=True)


@contextmanager
def meanwhile(system: System, look: Callable[[Redis], bool]) -> Iterator[None]:
    """Calls `look` with the system's store over and over, until it answers True."""
    store, over = _store(system), threading.Event()

    def run() -> None:
        while not over.wait(0.02) and not look(store):
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        store.close()


def end_valkey(store: Redis) -> bool:
    """SIGKILL to the system's Valkey, once the candidate is at its second step."""
    state = Canary.of(store.hget(keys.CANARIES, "tiny"))
    if state is None or state.phase != "judging" or state.step != 1:
        return False
    os.kill(int(store.info("server")["process_id"]), signal.SIGKILL)
    return True


def remove_weights(path: Path, store: Redis) -> bool:
    """A folder loses its weights as soon as a rollout to it has begun, before a worker has read them."""
    state = Canary.of(store.hget(keys.CANARIES, "tiny"))
    if state is None or state.phase != "preparing":
        return False
    (path / "model.safetensors").unlink()
    return True


def end_workers(store: Redis) -> bool:
    """SIGKILL to each worker of a version that is not the default, as soon as it has a task."""
    default = json.loads(str(store.hget(keys.MODELS, "tiny")))["version"]
    with store.pipeline(transaction=False) as pipe:
        for task_id in store.zrevrange(keys.REQUESTS, 0, 63):
            pipe.hmget(keys.task(str(task_id)), "status", "version", "owner")
        rows = pipe.execute()
    owners = {owner for status, version, owner in rows if status == "in_progress" and version != default}
    for owner in owners:
        if owner and store.exists(keys.lease(owner)):
            _kill(owner.rpartition(".")[0])
    return False


def _kill(name: str) -> None:
    """SIGKILL to the worker process that was started with this name."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            argv = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"worker" in argv and name.encode() in argv:
            os.kill(int(pid), signal.SIGKILL)


def copy_tasks(system: System, folder: Path) -> None:
    """All tasks are copied to the version in a folder."""
    system.run("models", "publish", f"./{folder.name}", "--as", f"tiny@{folder.name}")
    system.run("models", "shadow", "tiny", "--to", folder.name, "--percent", "100")


def measure(names: list[str], reports: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        system = System(folder, *UP)

        def _show(name: str, figures: dict[str, Any]) -> None:
            print(json.dumps({"candidate": name, **figures}), flush=True)
            if reports is not None:
                system.run(
                    "rollout", "report", "tiny", "--out", str(reports.resolve() / f"{name.replace(' ', '_')}.html")
                )

        try:
            for change in (nan, nan_in_a_token, refuses):
                if change.__name__ in names:
                    path = candidate(folder, change)
                    _show(change.__name__, asyncio.run(rollout(system, f"./{path.name}")))
            if "crashes" in names:
                with meanwhile(system, end_workers):
                    figures = asyncio.run(rollout(system, copied(folder, 0)))
                _show("crashes", figures)
            if "store_restarts" in names:
                with meanwhile(system, end_valkey):
                    figures = asyncio.run(rollout(system, copied(folder, 2)))
                _show("unchanged, Valkey ended by SIGKILL at the second step", figures)
            if "folder_is_gone" in names:
                path = folder / copied(folder, 3)
                with meanwhile(system, partial(remove_weights, path)):
                    figures = asyncio.run(rollout(system, f"./{path.name}"))
                _show("unchanged, its weights are gone before its workers are up", figures)
            for change in (garbage, unchanged):
                if change.__name__ in names:
                    path = candidate(folder, change)
                    copy_tasks(system, path)
                    _show(f"{change.__name__}, with copies", asyncio.run(rollout(system, f"./{path.name}", COPIES)))
                    system.run("models", "shadow", "tiny", "--off")
            if "tiny_v2" in names:
                shutil.copytree(BUNDLED / "tiny-v2", folder / "other")
                copy_tasks(system, folder / "other")
                _show("tiny-v2, with copies", asyncio.run(rollout(system, "./other", COPIES)))
                system.run("models", "shadow", "tiny", "--off")
            if "slower" in names:
                slow = candidate(folder, slower)
                _show("slower", asyncio.run(rollout(system, f"./{slow.name}", LONG)))
        finally:
            system.stop()


def measure_better() -> None:
    """tiny in the place of the slow one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        slow = candidate(folder, slower)
        system = System(folder, "--model", f"tiny=./{slow.name}", *UP[2:])
        try:
            figures = asyncio.run(rollout(system, copied(folder, 1)))
            print(json.dumps({"candidate": "better", **figures}), flush=True)
        finally:
            system.stop()


async def _streams(url: str, over: asyncio.Event) -> None:
    async with AsyncClient(url) as client:

        async def some(number: int) -> None:
            while not over.is_set():
                handle = await client.submit(model="stub", prompt=[1, 2, 3], max_tokens=TOKENS, seed=number)
                async for _ in handle.stream():
                    pass

        await asyncio.gather(*(some(number) for number in range(CONNECTIONS)))


async def _judged(url: str, store: Redis, longest_s: float) -> dict[str, Any]:
    """The rollout of `stub`, once it is decided or has lasted so long."""
    over, began = asyncio.Event(), time.monotonic()
    load = asyncio.create_task(_streams(url, over))
    while (state := canaries.read(store, "stub")) and state.under_way and time.monotonic() - began < longest_s:
        await asyncio.wait([load], timeout=1.0)
    over.set()
    await load
    assert state is not None
    evidence = Evidence.of(canaries.read_evidence(store, "stub"), state)
    figures = {finding.settings.metric.name: finding.figures() for finding in findings(state, evidence)}
    ended = {"phase": state.phase, "reason": state.reason, "candidate_requests": evidence.candidate.tasks}
    return {**ended, "seconds": round(time.monotonic() - began), "per_token": figures["per_token"]}


def measure_slower_steps() -> None:
    with ExitStack() as stack:
        url, store = stack.enter_context(valkey())
        for version, step_s in (("v1", STEP_S), ("v2", STEP_S * SLOWER_STEPS)):
            worker = Worker(url, STUB_VERSION=version, STUB_STEP_S=step_s)
            stack.enter_context(worker).wait_ready()
        sweeper = subprocess.Popen([*PENSTOCK, "sweeper", "--broker", url], cwd=ROOT)
        stack.callback(sweeper.wait)
        stack.callback(sweeper.terminate)
        routes.set_aliases(store, "stub", {"default": "v1", "candidate": "v2"})
        operations.start(store, "stub", "candidate", Plan((50.0,), hold_s=DECIDED_S))
        figures = asyncio.run(_judged(url, store, DECIDED_S))
        print(json.dumps({"candidate": f"steps take {SLOWER_STEPS} times as long", **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ["nan", "nan_in_a_token", "refuses", "crashes", "garbage", "unchanged", "tiny_v2", "slower"]
    every += ["store_restarts", "folder_is_gone", "better", "slower_steps"]
    parser.add_argument("--candidate", choices=every, action="append", help="this one alone; may be repeated")
    parser.add_argument("--reports", type=Path, help="a folder for their reports")
    options = parser.parse_args()
    names = options.candidate or every
    if {*names} - {"better", "slower_steps"}:
        measure(names, options.reports)
    if "better" in names:
        measure_better()
    if "slower_steps" in names:
        measure_slower_steps()


if __name__ == "__main__":
    main()
