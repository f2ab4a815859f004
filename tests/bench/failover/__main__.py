"""The command: see the package."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.failover.gateways import kill_gateway
from tests.bench.failover.load import Load
from tests.bench.failover.report import of_rounds, table
from tests.bench.failover.rounds import blow_by_blow, plain, strike
from tests.bench.failover.soak import counted, soak
from tests.bench.failover.system import running
from tests.chaos.kills import blows

#: Time (s) for which all stands before the first fault: more than a lease.
STAND_S = 12.0


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one kind."""
    found: dict[str, Any] = {"how": asked.how, "rounds": [], "returns": [], "load": os.getloadavg()[0]}
    gateways = 2 if asked.how == "gateway" and not asked.restart else 1
    options = ["--drain-timeout", str(asked.drain_s)]
    if asked.ranks * asked.stages > 1:
        options += ["--tensor-parallel", str(asked.ranks), "--pipeline-parallel", str(asked.stages)]
    with running(asked.workers, gateways, *options, supervised=asked.supervised) as system:
        load = Load([*system.gateways], asked.streams, asked.tokens)
        await load.start()
        await asyncio.sleep(STAND_S)
        if asked.how == "soak":
            found["soak"] = asdict(await soak(system, load, asked.soak, asked.pause)) | counted(load.ports[0])
        elif asked.within is not None:
            plan = blows(asked.seed, workers=asked.workers, kills=asked.kills, seconds=asked.within)
            found["rounds"] = [plain(one) for one in await blow_by_blow(system, load, plan)]
            await load.close()
            found["deaths"] = {
                "seen by a look": system.said(" is dead: "),
                "by a lapsed lease": system.said(" is gone: "),
            }
        else:
            for number in range(asked.kills):
                if asked.how == "gateway":
                    found["returns"] += await kill_gateway(system, load)
                else:
                    found["rounds"].append(plain(await strike(system, load, asked.how)))
                print(f"{number + 1} of {asked.kills}", flush=True)
            await load.close()
    found |= {"streams": len(load.done), "tokens": sum(len(one.came) for one in load.done), "faults": load.faults}
    return found


def summed(files: list[Path]) -> dict[str, Any]:
    """Runs of one kind as one."""
    whole, *others = [json.loads(file.read_text()) for file in files]
    for one in others:
        assert one["how"] == whole["how"]
        for name in ("rounds", "returns", "streams", "tokens", "faults"):
            whole[name] += one[name]
    return dict(whole)


def show(found: dict[str, Any]) -> str:
    """The figures as text."""
    rows = of_rounds(found["rounds"], found["how"]) if found["rounds"] else []
    if found["returns"]:
        rows.append(("**reconnect to its first event**", found["returns"]))
    lines = [table(rows)] if rows else []
    lines += [f"{name}: {value}" for name, value in found.get("soak", {}).items()]
    lines += [f"deaths {how}: {count}" for how, count in found.get("deaths", {}).items()]
    lines.append(
        f"{len(found['rounds'])} rounds; {found['streams']} streams, {found['tokens']} tokens; "
        f"streams lost, wrong, or with a token twice: {len(found['faults'])}"
    )
    return "\n".join([*lines, *found["faults"][:5]])


def main() -> int:
    """Measure and print; 1 where a stream was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="rounds")
    kind = parser.add_mutually_exclusive_group()
    for name in ("suspend", "drain", "gateway", "rank"):
        kind.add_argument(f"--{name}", dest="how", action="store_const", const=name, default="kill")
    kind.add_argument("--soak", type=float, metavar="SECONDS", help="kill connections in place of processes")
    kind.add_argument(
        "--within", type=float, metavar="SECONDS", help="kill so many within so long, in bursts, mostly the oldest"
    )
    parser.add_argument("--seed", type=int, default=1, help="with --within: of the plan")
    parser.add_argument("--restart", action="store_true", help="with --gateway: there is one, which is started again")
    parser.add_argument("--supervised", action="store_true", help="workers have a supervisor, as under `penstock up`")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="each worker's --tensor-parallel, as for --rank")
    parser.add_argument("--stages", type=int, default=1, help="each worker's --pipeline-parallel")
    parser.add_argument("--streams", type=int, default=16, help="streams open at a time")
    parser.add_argument("--tokens", type=int, default=900, help="tokens of each stream")
    parser.add_argument("--drain-s", type=float, default=2.0, help="the workers' drain timeout, s")
    parser.add_argument("--pause", type=float, default=0.5, help="with --soak: s between two faults")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sum", type=Path, nargs="+", metavar="FILE", help="print what earlier runs wrote, as one")
    asked = parser.parse_args()
    if asked.how == "rank" and asked.ranks * asked.stages == 1:
        parser.error("--rank kills a rank of --ranks or --stages, and there is one")
    if asked.soak is not None:
        asked.how = "soak"
    found = summed(asked.sum) if asked.sum else asyncio.run(measure(asked))
    if asked.json is not None:
        asked.json.write_text(json.dumps(found) + "\n")
    print(show(found))
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
