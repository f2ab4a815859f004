"""What a token of a live stream costs the store: `python -m tests.bench.store`.

A real Valkey. In a worker's place, this process sends APPENDs: each is one step, with new tokens of all sequences. A
connection of another process follows them as a gateway does, on a channel of its own or on all of theirs, and only
takes what comes. Printed: the server's processor time for each token, all its threads together, and of it what the
server counts for each command; what these leave of `evalsha` is the script itself, and what that leaves of all is
requests, answers and messages.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing as mp
import time
from collections.abc import Sequence
from typing import Any

from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store.protocol import Append, admit, append, follow
from tests.processes import valkey

CLAIM = "7f1f9bd2-6d0a-4d6e-9d5c-0d2f6b7f1a11"
#: Steps that nothing is measured of.
FIRST = 10


def listen(url: str, channels: Sequence[str]) -> None:
    """A process that listens to these channels, and looks at nothing that it hears."""
    connection: Any = Redis.from_url(url).connection_pool.make_connection()
    connection.connect()
    connection.send_command("SUBSCRIBE", *channels)
    while connection._sock.recv(1 << 18):
        pass


def measure(sequences: int, tokens: int, steps: int, readers: str) -> dict[str, Any]:
    with valkey() as (url, redis):
        ids = [f"4f2a7c1e-9b3d-4c58-8e21-{number:012x}" for number in range(sequences)]
        now = int(redis.time()[0] * 1000)  # type: ignore[index]
        task = json.dumps({"model": "stub", "prompt": [7] * 100, "seed": 1, "max_tokens": tokens * steps})
        record: dict[str, str | int] = {
            "task": task,
            "model": "stub",
            "queue": "penstock:queue:stub@1",
            "tier": "default",
            "n": 1,
        }
        for task_id in ids:
            run(redis, admit(task_id, "", now, record))
            redis.hset(keys.task(task_id), mapping={"status": "in_progress", "claim": CLAIM, "started": now})
        channels: list[str] = []
        if readers == "tasks":
            channels = [keys.channel(task_id) for task_id in ids]
        elif readers == "process":
            channels = [keys.process_channel("bench")]
        if channels:
            # By its module's name, which is another one than `__main__` wherever it is run.
            target = importlib.import_module("tests.bench.store").listen
            mp.get_context("spawn").Process(target=target, args=(url, channels), daemon=True).start()
        while not all(count for _, count in redis.pubsub_numsub(*channels)):  # type: ignore[no-untyped-call]
            time.sleep(0.01)
        if readers == "process":
            run(redis, follow("bench", ids))
        before = 0.0
        for step in range(FIRST + steps):
            if step == FIRST:
                redis.config_resetstat()
                before = cpu_s(redis)
            at = step * tokens
            entries = [f'[0,{index},{index % 1000}," word"]' for index in range(at, at + tokens)]
            run(redis, append([Append(task_id, CLAIM, 0, at, entries) for task_id in ids]))
        used, all_tokens = cpu_s(redis) - before, sequences * tokens * steps
        commands = redis.info("commandstats")
        each = {name.removeprefix("cmdstat_"): said["usec"] / all_tokens for name, said in commands.items()}
        return {
            "tokens": all_tokens,
            "readers": readers,
            "us_per_token": 1e6 * used / all_tokens,
            "commands_us": {name: us for name, us in sorted(each.items(), key=lambda item: -item[1]) if us >= 0.01},
        }


def cpu_s(redis: Redis) -> float:
    """The processor time (s) that the server has used."""
    said = redis.info("cpu")
    return float(said["used_cpu_user"]) + float(said["used_cpu_sys"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1, help="tokens of each sequence in a step")
    parser.add_argument("--steps", type=int, default=400)
    where = "where they listen: to a channel of their process, to those of all tasks, or nowhere"
    parser.add_argument("--readers", choices=("process", "tasks", "none"), default="process", help=where)
    args = parser.parse_args()
    print(json.dumps(measure(args.sequences, args.tokens, args.steps, args.readers)))


if __name__ == "__main__":
    main()
