"""The units of `infra/systemd`: by their directives, and against the code."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from producers.admin.roles import ROLES
from tests.infra.deploy.code import grace, parsed, variables
from tests.processes import ROOT

FOLDER = ROOT / "infra" / "systemd"
UNITS = sorted(path.name for path in FOLDER.glob("*.service"))
#: Directives of systemd 252 (systemd.unit(5), .service(5), .exec(5), .kill(5)) that units here may have.
KNOWN = {
    "Unit": {"Description", "Documentation", "Wants", "After"},
    "Service": {
        *("Type", "User", "Group", "Environment", "EnvironmentFile", "ExecStart", "WorkingDirectory", "LimitNOFILE"),
        *("Restart", "RestartSec", "KillMode", "TimeoutStartSec", "TimeoutStopSec", "StateDirectory", "CacheDirectory"),
        *("NoNewPrivileges", "CapabilityBoundingSet", "ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices"),
        *("ProtectClock", "ProtectHostname", "ProtectKernelLogs", "ProtectKernelModules", "ProtectKernelTunables"),
        *("ProtectControlGroups", "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "UMask"),
        *("RestrictSUIDSGID", "LockPersonality", "SystemCallArchitectures", "SystemCallFilter"),
    },
    "Install": {"WantedBy"},
}
HARDENING = {
    **dict.fromkeys(("NoNewPrivileges", "ProtectHome", "PrivateTmp", "LockPersonality", "RestrictSUIDSGID"), "yes"),
    "ProtectSystem": "strict",
    "CapabilityBoundingSet": "",
    "User": "penstock",
}


def complaints(text: str) -> Iterator[str]:
    """The faults of a unit, in words."""
    said: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        name, _, value = line.partition("=")
        said[name].append(value)
        if name not in KNOWN.get(section, ()):
            yield f"{name} is no directive of [{section}]"
    yield from (f"{name} is not {value!r}" for name, value in HARDENING.items() if said[name] != [value])
    yield from _command(said)


def _command(said: dict[str, list[str]]) -> Iterator[str]:
    given = dict(re.findall(r"(\w+)=(\S+)", " ".join(said["Environment"])))
    command = said["ExecStart"][0]
    used = set(re.findall(r"\$\{?(\w+)", command))
    yield from (f"nothing reads the variable {name}" for name in sorted(given.keys() - variables() - used))
    # $NAME, which may be several words or none, is empty here.
    words = re.sub(r"\$\w+", "", re.sub(r"\$\{(\w+)\}", lambda one: given[one[1]], command))
    program, *argv = shlex.split(words)
    if program != "/opt/penstock/bin/penstock":
        yield f"{program} is not ours"
    try:
        parsed(argv)
    except ValueError as error:
        yield str(error)
        return
    limit = (said["TimeoutStopSec"] or ["0"])[0]
    if float(limit) < grace(argv):
        yield f"it is killed after {limit} s, and may need {grace(argv):g} s"
    if f"-/etc/penstock/secrets/{argv[0]}.env" not in said["EnvironmentFile"] or argv[0] not in ROLES:
        yield "it is not told the server's URL for its role"
    if (said["Type"] == ["notify"]) != (argv[0] == "worker"):
        yield "workers alone say that they are ready"
    if argv[0] in ("worker", "autoscaler") and (said["ProtectClock"] or said["PrivateDevices"]):
        yield "it may use no GPU"


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_right(name: str) -> None:
    assert list(complaints((FOLDER / name).read_text("utf-8"))) == []


def test_each_process_of_the_procfile_has_a_unit() -> None:
    named = {line.partition(":")[0] for line in (ROOT / "Procfile").read_text("utf-8").splitlines() if line}
    assert {name.removeprefix("penstock-").removesuffix(".service").rstrip("@") for name in UNITS} == named


def test_systemd_itself_finds_nothing(tmp_path: Path) -> None:
    """Where it is installed."""
    for name in UNITS:
        text = (FOLDER / name).read_text("utf-8").replace("/opt/penstock/bin/penstock", "/bin/true")
        (tmp_path / name).write_text(text)
    if shutil.which("systemd-analyze"):
        ran = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *tmp_path.iterdir()], capture_output=True, text=True
        )
        assert (ran.returncode, [line for line in ran.stderr.splitlines() if "penstock" in line]) == (0, [])


WORKER = (FOLDER / "penstock-worker@.service").read_text("utf-8")
WRONG = {
    "a misspelt directive": (WORKER.replace("TimeoutStopSec", "TimeoutStopSecs"), "TimeoutStopSecs is no directive"),
    "killed while it drains": (WORKER.replace("--drain-timeout 90", "--drain-timeout 91"), "may need 121 s"),
    "an option that is gone": (WORKER.replace("--drain-timeout", "--drain-time"), "--drain-time"),
    "may write everywhere": (WORKER.replace("ProtectSystem=strict", "ProtectSystem=no"), "ProtectSystem"),
    "a variable that nobody reads": (WORKER.replace("PENSTOCK_MODELS=", "PENSTOCK_MODEL="), "PENSTOCK_MODEL"),
    "hides the GPUs": (WORKER.replace("[Install]", "ProtectClock=yes\n[Install]"), "may use no GPU"),
    "another's user": (WORKER.replace("secrets/worker.env", "secrets/operator.env"), "for its role"),
    "waits for no word": (WORKER.replace("Type=notify", "Type=exec"), "say that they are ready"),
}


@pytest.mark.parametrize(("text", "told"), WRONG.values(), ids=WRONG)
def test_a_wrong_unit_is_found(text: str, told: str) -> None:
    found = list(complaints(text))
    assert any(told in one for one in found), found
