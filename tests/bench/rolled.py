"""Rollouts on real workers under load: `python -m tests.bench.rolled`.

`penstock up` serves the bundled model tiny, and connections stream greedy completions of it without a pause. Meanwhile
it is rolled out to copies of itself, one after another, each of another version and no worse: how each ends is the
figure. Then it is rolled out to tiny-v2, whose answers differ, and back. Counted are requests that failed, streams that
broke, and answers that are not the one of the version that their headers name: those of mixed versions among them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.processes import ROOT, free_port
from tests.waiting import until
from workers.library.reference import BUNDLED

PROMPTS = [f"def {name}(" for name in ("read", "write", "sort_by", "main", "parse", "close", "open_file", "join")]
PENSTOCK = (sys.executable, "-P", "-m", "workers.cli")
CONNECTIONS, TOKENS = 6, 16
UP = ("--model", "tiny", "--keep-warm", "0")
PLAN = ("--steps", "10,50,100", "--hold", "15s", "--min-samples", "40", "--warm-up", "5s")
#: Longest time (s) of a rollout, of its workers' start, and of an answer once it has ended.
ROLLOUT_S, START_S, ANSWERED_S = 900.0, 300.0, 60.0


class System:
    """`penstock up` in a folder. `options`: its models and others."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{(port := free_port())}"
        self.env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._log = (folder / "up.log").open("wb")
        argv = (*PENSTOCK, "up", *options, "--data-dir", "data", "--port", str(port))
        self._up = subprocess.Popen(argv, cwd=folder, env=self.env, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            until(lambda: "Penstock is ready" in (folder / "up.log").read_text(), START_S)
        except BaseException:
            self.stop()
            raise

    def run(self, *argv: str) -> str:
        """The output of a command."""
        line = [*PENSTOCK, *argv, "--data-dir", "data"]
        done = subprocess.run(line, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{line}: {done.stderr}")
        return done.stdout

    def stop(self) -> None:
        self._up.send_signal(signal.SIGTERM)
        try:
            self._up.wait(120)
        finally:
            self._up.kill()
            self._log.close()


class Load:
    """Streams until it is stopped. `answers`: (version, prompt) -> texts, with how often each came; `versions`: version
    -> requests, also those whose stream broke; `open`: requests that have no answer yet."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, asyncio.Event()
        self.answers: dict[tuple[str, int], Counter[str]] = {}
        self.counts: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.open = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            await asyncio.gather(*(self._stream(client, number) for number in range(CONNECTIONS)))

    def stop(self) -> None:
        self._over.set()

    async def _stream(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._over.is_set():
            number = (number + 1) % len(PROMPTS)
            body = {"model": "tiny", "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0, "stream": True}
            self.counts["requests"] += 1
            self.open += 1
            try:
                async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
                    self.versions[answer.headers.get("penstock-version", "")] += 1
                    lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
                    if answer.status_code != 200:
                        self.counts["failed"] += 1
                        continue
            except httpx.HTTPError:
                self.counts["broken_streams"] += 1
                continue
            finally:
                self.open -= 1
            chunks = [json.loads(line) for line in lines if line != "[DONE]"]
            if lines[-1:] != ["[DONE]"] or any("error" in chunk for chunk in chunks):
                self.counts["broken_streams"] += 1
                continue
            text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
            key = answer.headers["penstock-version"], number
            self.answers.setdefault(key, Counter())[text] += 1

    def figures(self) -> dict[str, Any]:
        """`other_answers`: of those of a version to a prompt all but the most frequent one."""
        others = sum(texts.total() - max(texts.values()) for texts in self.answers.values())
        counts = {name: self.counts[name] for name in ("requests", "failed", "broken_streams", "unanswered")}
        versions = {version for version, _ in self.answers}
        return {**counts, "other_answers": others, "versions": len(versions)}


def copied(folder: Path, number: int) -> str:
    """Another version of tiny that is no worse: its folder."""
    copy = folder / f"copy{number}"
    shutil.copytree(BUNDLED / "tiny", copy)
    settings = json.loads((copy / "generation_config.json").read_text("utf-8"))
    (copy / "generation_config.json").write_text(json.dumps({**settings, "copy": number}), "utf-8")
    (copy / "manifest.json").unlink(missing_ok=True)
    return f"./{copy.name}"


async def rollout(system: System, to: str, plan: Sequence[str] = PLAN, *, full: bool = False) -> dict[str, Any]:
    """One rollout, until it has ended. `plan`: options of `start`; `full`: it is promoted by hand once it is judged."""
    load, began = Load(system.url), time.monotonic()
    status = ("rollout", "status", "tiny", "--json")
    running = asyncio.create_task(load.run())

    async def state() -> dict[str, Any]:
        for _ in range(60):
            with suppress(SystemExit):  # the store may be about to start again
                found: dict[str, Any] = json.loads(await asyncio.to_thread(system.run, *status))
                return found
            await asyncio.sleep(1.0)
        raise SystemExit(f"no status of the rollout to {to}")

    try:
        await asyncio.to_thread(system.run, "rollout", "start", "tiny", "--to", to, *plan, "--timeout", "5m")
        while (now := await state())["phase"] in ("preparing", "judging") and time.monotonic() - began < ROLLOUT_S:
            if full and now["phase"] == "judging":
                with suppress(SystemExit):  # it may have been promoted by itself meanwhile
                    await asyncio.to_thread(system.run, "rollout", "promote", "tiny", "--full")
            await asyncio.wait([running], timeout=1.0)
            if running.done():
                break
        await asyncio.sleep(5.0 if full else 0.0)
    finally:
        load.stop()
        await asyncio.wait([running], timeout=ANSWERED_S)
        load.counts["unanswered"] = load.open  # such as of a version that has no workers any more
        if not running.cancel():
            running.result()
    compared = max((metric["n"] for metric in now["metrics"].values()), default=0)
    ended = {"phase": now["phase"], "step": now["step"], "reason": now["reason"], "comparisons": compared}
    ended |= {"candidate_requests": load.versions[now["version"]], "likelihood": now["metrics"].get("likelihood")}
    return {**ended, "seconds": round(time.monotonic() - began), **load.figures()}


def measure(rollouts: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        system = System(Path(name), *UP)
        try:
            for number in range(rollouts):
                figures = asyncio.run(rollout(system, copied(Path(name), number)))
                print(json.dumps({"rollout": "null", **figures}), flush=True)
            shutil.copytree(BUNDLED / "tiny-v2", Path(name) / "other")
            print(json.dumps({"rollout": "tiny-v2", **asyncio.run(rollout(system, "./other", full=True))}), flush=True)
        finally:
            system.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5, help="rollouts to copies")
    measure(parser.parse_args().rollouts)


if __name__ == "__main__":
    main()
