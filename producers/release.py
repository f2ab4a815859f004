"""The release of Penstock that this process runs, as `--version`, leases, records and metrics name it."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: The folder that holds the packages: a checkout's root, or site-packages.
ROOT = Path(__file__).parent.parent
#: Time (s) that git may take.
GIT_S = 5.0


@cache
def release() -> str:
    """The package's version. In a git checkout its commit is added as a local version (PEP 440): `0.2.0+g7ed59863`."""
    try:
        package = version("penstock")
    except PackageNotFoundError:  # copied into another program, say
        package = "unknown"
    if not (ROOT / ".git").exists():
        return package
    command = ("git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD")
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return package
    return f"{package}+g{commit}"
