"""Combines the results of check.sh's parts in a folder into report.json, report.txt and report.md. Exits 0 if all
passed.

    python infra/gpu/report.py FOLDER PART...

The report also has parts that an earlier run left. Only the parts given here decide the exit status.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
TESTS, FIGURES = ("kernels", "parity", "engine"), ("bench", "peer", "alone", "ranks")
#: The number of last lines of a log that are shown with a failure.
TAIL = 60


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "packages": {}}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found["packages"][name] = version(name)
    asked = ("name", "compute_cap", "memory.total", "driver_version")
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["nvidia-smi", f"--query-gpu={','.join(asked)}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        found["gpus"] = [dict(zip(asked, map(str.strip, line.split(",")), strict=False)) for line in said]
    return found


def ended(folder: Path, part: str) -> dict[str, Any]:
    """A part's exit status and seconds, both None if it was killed."""
    path = folder / f"{part}.status"
    if not path.is_file():
        return {"exit_status": None, "seconds": None}
    status, seconds = map(int, path.read_text().split())
    return {"exit_status": status, "seconds": seconds}


def tests(folder: Path, part: str) -> dict[str, Any]:
    """The counts of tests and the names of failed ones. Read from the log if the part was killed before it wrote its
    XML."""
    found = ended(folder, part)
    found["whole"] = found["exit_status"] in (0, 1)  # all tests ran; 2 or more means that the session was cut short
    with suppress(FileNotFoundError, ElementTree.ParseError):
        suite = ElementTree.parse(folder / f"{part}.xml").getroot().find("testsuite")  # noqa: S314  # pytest's own
        assert suite is not None
        failed = [
            f"{case.attrib['classname']}::{case.attrib['name']}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        return found | {
            "tests": int(suite.attrib["tests"]),
            "skipped": int(suite.attrib["skipped"]),
            "failed": failed,
        }
    # The format of pytest-xdist: [gw0] [ 12%] PASSED tests/test_a.py::test_b[c]
    log = (folder / f"{part}.log").read_text(errors="replace")
    outcomes = re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (\S+::.*?) *$", log, re.MULTILINE)
    return found | {
        "tests": len(outcomes),
        "skipped": sum(outcome == "SKIPPED" for outcome, _ in outcomes),
        "failed": [name for outcome, name in outcomes if outcome in ("FAILED", "ERROR")],
    }


def read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None


def only(bench: Any) -> dict[str, Any]:
    """The only measure of a bench, {} if there is none."""
    return next(iter((bench or {}).get("measures", {}).values()), {})


def figures(folder: Path) -> dict[str, Any]:
    bench, short, peer = (read(folder / f"{name}.json") for name in ("bench", "short", "peer"))
    found: dict[str, Any] = {"bench": bench, "short": short, "peer": peer}
    ours = only(short).get("output_tokens_per_s")
    if ours and peer:
        found["ratio"] = ours / peer["output_tokens_per_s"]
    return found


def rows(found: dict[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """The rows of the table of figures: measure, figure, limit, share of the limit, goal."""
    measures = (found["bench"] or {}).get("measures", {})
    made = []
    for name, one in measures.items():
        if "error" in one:
            made.append((name, one["error"], "", "", ""))
            continue
        share = f"{100 * one['share']:.0f} %" if one.get("share") else "-"
        goal = f"{100 * one['goal']:.0f} %" if one.get("goal") else "-"
        if name.startswith("decode"):
            limit = f"{one['limit_ms']:.2f} ms" if "limit_ms" in one else "-"
            title = f"a step at batch {one['batch']}, context {one['context']:.0f}"
            made.append((title, f"{one['step_ms']:.2f} ms", limit, share, goal))
        elif "tokens_per_s" in one or "output_tokens_per_s" in one:
            limit = f"{one['limit_tokens_per_s']:,.0f} tokens/s" if "limit_tokens_per_s" in one else "-"
            if name == "prefill":
                title, rate = f"prefill, prompts of {one['prompt']}", one["tokens_per_s"]
            else:
                title = f"offline, {one['requests']} requests of {one['prompt']} + {one['output']}"
                rate = one["output_tokens_per_s"]
            made.append((title, f"{rate:,.0f} tokens/s", limit, share, goal))
    if found["short"] and found["peer"]:
        ours, theirs = only(found["short"]), found["peer"]
        what = f"{theirs['requests']} requests of {theirs['prompt']} + {theirs['output']}"
        made.append((f"{what}, Penstock", f"{ours.get('output_tokens_per_s', 0):,.0f} tokens/s", "-", "-", "-"))
        name = f"{what}, transformers {theirs['transformers']}, continuous batching"
        made.append((name, f"{theirs['output_tokens_per_s']:,.0f} tokens/s", "-", "-", "-"))
    if "ratio" in found:
        made.append(("ratio of these two", f"{found['ratio']:.1f}", "-", "-", "3"))
    return made


def markdown(report: dict[str, Any]) -> str:
    """The figures in Markdown, for docs/notes/gpu-limits.md."""
    bench = report["figures"]["bench"] or report["figures"]["short"]
    if bench is None:
        return "Nothing was measured.\n"
    packages = ", ".join(f"{name} {number}" for name, number in report["machine"]["packages"].items())
    shape, where = bench["shape"], bench.get("gpu", "a CPU, tiny")
    head = ("| figure | limit | share | goal |", "| --- | --- | --- | --- |")
    lines = [f"{where}, {shape} shape, bf16, random weights; {report['when'][:10]}; {packages}:", ""]
    lines += [f"| {shape} {head[0]}", f"| --- {head[1]}"]
    lines += [f"| {' | '.join(row)} |" for row in rows(report["figures"])]
    for name, whose, whole in (("profile", "the device's", "step_ms"), ("host", "the host's", "ms")):
        one = bench.get("measures", {}).get(name, {})
        if "parts_ms" in one:
            lines += ["", f"| a step of {one['batch']}, {whose} time | {one[whole]:.2f} ms |", "| --- | --- |"]
            lines += [f"| {part} | {spent:.2f} ms |" for part, spent in one["parts_ms"].items()]
    return "\n".join(lines) + "\n"


def text(report: dict[str, Any], folder: Path) -> str:
    lines = [f"Penstock engine check: {'ok' if report['ok'] else 'FAILED'}, {report['when']}"]
    lines.append(json.dumps(report["machine"]))
    for part, found in report["tests"].items():
        whole = f"{found['seconds']} s" if found["whole"] else "did not come to its end"
        counts = f"{found['tests']} tests, {len(found['failed'])} failed, {found['skipped']} skipped"
        lines.append(f"{part}: {counts} ({whole}, exit status {found['exit_status']})")
        lines += [f"  failed: {case}" for case in found["failed"]]
    for part, found in report["ended"].items():
        lines.append(f"{part}: exit status {found['exit_status']}, {found['seconds']} s")
    warmed = (report["figures"]["bench"] or {}).get("warm")
    if warmed is not None:
        said = "all found again" if warmed["verified"] else "NOT all found again"
        lines.append(f"warm: {warmed['kernels']} kernels, {warmed['built']} built in {warmed['seconds']:.1f} s, {said}")
    compiled = (report["figures"]["bench"] or {}).get("compiled")
    if compiled is not None:
        built = ", ".join(sorted(set(compiled["built"]))) or "none"
        lines.append(f"kernels compiled during the bench: {built}; found in the cache: {len(compiled['from_cache'])}")
    table = rows(report["figures"])
    if table:
        widths = [max(len(row[k]) for row in table) for k in range(5)]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    for part in {"alone", "ranks"} & set(report["ended"]):
        lines += ["", f"{part}:", (folder / f"{part}.log").read_text(errors="replace").rstrip()]
    for part, found in (report["tests"] | report["ended"]).items():
        if found["exit_status"] != 0 and part not in ("alone", "ranks"):
            written = (folder / f"{part}.log").read_text(errors="replace").splitlines()
            lines += ["", f"{part}, end of its log:", *written[-TAIL:]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+", choices=[*TESTS, *FIGURES])
    args = parser.parse_args()
    ran = [part for part in (*TESTS, *FIGURES) if (args.folder / f"{part}.log").is_file()]
    report: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "tests": {part: tests(args.folder, part) for part in TESTS if part in ran},
        "ended": {part: ended(args.folder, part) for part in FIGURES if part in ran},
        "figures": figures(args.folder),
    }
    statuses = {part: found["exit_status"] for part, found in (report["tests"] | report["ended"]).items()}
    report["ok"] = all(statuses.get(part) == 0 for part in args.parts)
    (args.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (args.folder / "report.md").write_text(markdown(report))
    written = text(report, args.folder)
    (args.folder / "report.txt").write_text(written)
    sys.stdout.write(written)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
