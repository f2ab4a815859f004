"""`python -m tests.protocol.model`: check all scenarios, or some; with all rules, or without some."""

from __future__ import annotations

import argparse
import gc
import sys
import time

from tests.protocol.model import ALL, RULES, SCENARIOS, explore


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.model", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, metavar="NAME", help=", ".join(SCENARIOS))
    parser.add_argument("--drop", action="append", default=[], choices=RULES, metavar="RULE", help="without this rule")
    parser.add_argument("--mutants", action="store_true", help="drop each rule in turn; every one must be caught")
    parser.add_argument("--limit", type=int, default=4_000_000, help="states per scenario (%(default)s)")
    parser.add_argument("--rules", action="store_true", help="list the rules")
    args = parser.parse_args()
    if args.rules:
        for name, rule in RULES.items():
            print(f"{name:18} {rule.scenario:15} {rule.says}")
        return 0
    if args.mutants:
        runs = [(name, rule.scenario, ALL - {name, *rule.behind}) for name, rule in RULES.items()]
    else:
        runs = [("", name, ALL - set(args.drop)) for name in args.scenario or SCENARIOS]
    gc.disable()  # millions of tuples, in no circles: to look through them again and again takes a tenth of the time
    failures = 0
    for dropped, scenario, rules in runs:
        began = time.monotonic()
        verdict = explore(SCENARIOS[scenario], rules, args.limit)
        took = time.monotonic() - began
        print(
            f"{dropped:18} {scenario:15} {verdict.states:9,} states {took:6.1f} s  {verdict.says or 'clean'}",
            flush=True,
        )
        for i, step in enumerate(verdict.trace, 1):
            print(f"      {i:2} {step}")
        caught = bool(verdict.says) and not verdict.says.startswith("more than")
        failures += not caught if args.mutants else bool(verdict.says)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
