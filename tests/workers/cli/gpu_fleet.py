"""`penstock worker --gpus` with the stub engine on GPUs that are not there: python -m ... URL GPU,GPU,... DRAIN"""

from __future__ import annotations

import asyncio
import json
import sys

from workers.cli import supervised
from workers.cli.gpus import Chosen, programs
from workers.processes.supervisor import Program

#: As tests.processes.Worker starts one, but by the command line that `programs` adds the name to.
CHILD = """
import json, sys
from workers.runtime import drain
drain.HAND_BACK_S, drain.EXIT_S = 20.0, 40.0
from workers.settings import WorkerSettings
from workers.runtime.worker import run_worker
sys.exit(run_worker(WorkerSettings(**json.loads(sys.argv[1]), name=sys.argv[3])))
"""


def fleet(url: str, labels: list[str], drain: float) -> list[Program]:
    settings = {"broker": url, "store": url, "model": "stub", "engine_factory": "tests.stub_engine:load"}
    argv = [sys.executable, "-c", CHILD, json.dumps({**settings, "drain": drain, "lease": 300.0})]
    gpus = [Chosen(label, label.removeprefix("gpu")) for label in labels]
    return programs(gpus, argv, {"BROKER_URL": url}, "node", [None] * len(gpus))


def say(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


if __name__ == "__main__":
    supervised.HAND_BACK_S = 60.0  # type: ignore[misc] # on a machine that is busy
    url, labels, drain = sys.argv[1], sys.argv[2].split(","), float(sys.argv[3])
    sys.exit(asyncio.run(supervised.supervise(fleet(url, labels, drain), say, drain)))
