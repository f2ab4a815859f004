"""Do harm to a system of its own, and prove that it kept its promises.

    python -m tests.chaos --seed 7 --minutes 2                        # every kind of fault, stub engine
    python -m tests.chaos --seed 1 --kills 200 --engine bundled       # kill -9 of workers, gateway, sweeper, clients
    python -m tests.chaos --seed 1 --minutes 5 --sqs                  # the broker on SQS, with AWS's faults
    python -m tests.chaos --seed 1 --kills 100 --keys --gateways 2    # several tenants' keys, with limits
    python -m tests.chaos --replay FOLDER/plan.json                   # the same again

The plan of faults is written down first. Prints a table (stderr: what is done, as it is done). Where any promise was
broken it exits with 1, and plan, journals and logs are kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from tests.chaos.driver import ALL_KINDS, SQS_KINDS, plan_of, run
from tests.chaos.stage import Shape
from workers.trials.chaos.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1.0, help="of load under faults (default: 1)")
    parser.add_argument(
        "--faults", default=None, help=f"kinds, with commas between (default: all): {', '.join(ALL_KINDS)}"
    )
    parser.add_argument("--kills", type=int, default=None, help="go on until so many processes were killed")
    parser.add_argument("--engine", choices=("stub", "bundled"), default="stub")
    parser.add_argument("--lease", type=float, default=None, help="s (default: 2; with --kills the workers' own, 10)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--open-tasks", type=int, default=None, help="that each client has at a time")
    parser.add_argument("--sqs", action="store_true", help="the broker is SQS, with AWS's faults beside")
    parser.add_argument("--keys", action="store_true", help="gateways ask for API keys, some with limits")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--deterministic", action="store_true", help="workers in the engine's deterministic mode")
    parser.add_argument("--replay", type=Path, default=None, metavar="PLAN", help="a plan.json")
    parser.add_argument("--folder", type=Path, default=None, help="for plan, journals and logs; kept")
    parser.add_argument("--json", type=Path, default=None, help="where to write the report, too")
    args = parser.parse_args()
    command = f"python -m tests.chaos {shlex.join(sys.argv[1:])}"
    plan = Plan.read(args.replay) if args.replay else _drawn(args)
    if args.folder is not None:
        args.folder.mkdir(parents=True)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    outcome = run(plan, command=command, folder=args.folder, say=say)
    if args.json is not None:
        args.json.write_text(json.dumps(outcome.report.json(), indent=1))
    print(outcome.report.markdown())
    if not outcome.report.fine:
        say(outcome.say())
    sys.exit(0 if outcome.report.fine else 1)


def _drawn(args: argparse.Namespace) -> Plan:
    every = SQS_KINDS if args.sqs else ALL_KINDS
    kinds = args.faults.split(",") if args.faults else (["kill"] if args.kills else list(every))
    if unknown := set(kinds) - set(every):
        sys.exit(f"there is no fault {', '.join(sorted(unknown))} here; there are {', '.join(every)}")
    shape = Shape(
        engine=args.engine,
        workers=args.workers,
        clients=args.clients,
        settable_clocks="clock" in kinds,
        sqs=args.sqs,
        servers=1 if args.sqs else 2,
        deterministic=args.deterministic,
        gateways=args.gateways,
        keys=args.keys,
    )
    if args.kills:  # room for the whole load, so that a stream never waits for room but for a worker
        shape = replace(shape, lease=10.0, seqs=32, open_tasks=10, longest=400, variants=120, max_deaths=3, step=0.02)
    if args.lease is not None:
        shape = replace(shape, lease=args.lease)
    if args.open_tasks is not None:
        shape = replace(shape, open_tasks=args.open_tasks)
    pause = (0.1, 5.0) if args.kills else (0.2, 4.0)
    return plan_of(args.seed, shape, seconds=60 * args.minutes, kinds=kinds, kills=args.kills, pause=pause)


if __name__ == "__main__":
    main()
