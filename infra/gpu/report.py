"""Puts what check.sh left in its work folder into report.json and report.txt; exits 0 if all of it went well."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
#: Lines of a log that a failure is shown with.
TAIL = 60


def machine() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }
    if torch.cuda.is_available():
        traits = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": traits.name,
            "capability": f"{traits.major}.{traits.minor}",
            "memory_gib": round(traits.total_memory / (1 << 30), 1),
            "cuda": torch.version.cuda,
        }
    return found


def status(work: Path, name: str) -> int:
    return int((work / f"{name}.status").read_text())


def tests(work: Path, name: str) -> dict[str, Any]:
    """Counts, and the names of what failed. A run that was killed left no XML."""
    found: dict[str, Any] = {"exit_status": status(work, name), "failed": []}
    path = work / f"{name}.xml"
    if path.is_file():
        suite = ElementTree.parse(path).getroot().find("testsuite")  # noqa: S314  # pytest's own output
        assert suite is not None
        found |= {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
        found["seconds"] = float(suite.attrib["time"])
        found["failed"] = [
            f"{case.attrib['classname']}::{case.attrib['name']}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
    return found


def text(report: dict[str, Any], work: Path) -> str:
    lines = [f"Penstock engine check: {'ok' if report['ok'] else 'FAILED'}, {report['seconds']} s, {report['when']}"]
    lines.append(json.dumps(report["machine"]))
    for name, found in report["tests"].items():
        counts = ", ".join(f"{found[key]} {key}" for key in ("tests", "failures", "errors", "skipped") if key in found)
        lines.append(f"tests/{name}: {counts or 'did not end'} (exit status {found['exit_status']})")
        lines += [f"  failed: {case}" for case in found["failed"]]
    lines.append(f"bench, {report['shape']} shape (exit status {report['bench_exit_status']}):")
    lines.append((work / "bench.log").read_text(errors="replace").rstrip())
    for name, found in report["tests"].items():
        if found["exit_status"] != 0:
            log = (work / f"{name}.log").read_text(errors="replace").splitlines()
            lines += ["", f"tests/{name}, end of its log:", *log[-TAIL:]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--seconds", type=int, required=True)
    args = parser.parse_args()
    bench = args.work / "bench.json"
    report: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": args.seconds,
        "machine": machine(),
        "tests": {name: tests(args.work, name) for name in ("engine", "parity")},
        "shape": args.shape,
        "bench_exit_status": status(args.work, "bench"),
        "bench": json.loads(bench.read_text()) if bench.is_file() else None,
    }
    report["ok"] = report["bench_exit_status"] == 0 and not any(
        found["exit_status"] for found in report["tests"].values()
    )
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    written = text(report, args.work)
    (args.out / "report.txt").write_text(written)
    sys.stdout.write(written)
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
