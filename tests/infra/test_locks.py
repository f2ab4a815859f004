"""The locks of `requirements/` hold what pyproject.toml asks for, within its ranges, by version and hash."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import requires

import pytest
from packaging.markers import Marker, default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.processes import ROOT

FOLDER = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
#: File -> the extras whose dependencies it locks, beside the project's own. smollm2.txt has a package alone.
LOCKED = [extra for extra in EXTRAS if extra != "smollm2"]
LOCKS = {**{extra: [extra] for extra in LOCKED if extra not in ("gpu", "dev")}, "cuda": ["gpu"], "dev": LOCKED}
#: Machines for which a lock has to do, as markers see them.
MACHINES = [
    {
        **{name: str(value) for name, value in default_environment().items()},
        "python_version": python,
        "python_full_version": f"{python}.4",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    for python in ("3.11", "3.12", "3.13")
    for machine in ("x86_64", "aarch64")
]


@cache
def entries(name: str) -> list[tuple[Requirement, list[str]]]:
    """Each requirement of a lock, with the hashes that a file of it may have."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / f"{name}.txt").read_text("utf-8"), flags=re.MULTILINE)
    found = []
    for entry in text.replace("\\\n", " ").splitlines():
        line, *hashes = entry.split(" --hash=")
        found.append((Requirement(line.strip()), [one.strip() for one in hashes]))
    return found


def versions(name: str, machine: dict[str, str]) -> dict[str, str]:
    """Package -> the version that a lock gives this machine."""
    found = {}
    for entry, _ in entries(name):
        if entry.marker is None or entry.marker.evaluate(machine):
            package = canonicalize_name(entry.name)
            assert package not in found, f"two versions of {package} for one machine"
            (pin,) = entry.specifier
            assert pin.operator == "==", entry
            found[package] = pin.version
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.txt")))
def test_a_lock_has_a_hash_for_each_package_and_names_no_index(name: str) -> None:
    if name in ("torch", "override"):
        return  # by version alone: requirements/torch.txt says why
    assert all(hashes for _, hashes in entries(name))
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for _, hashes in entries(name) for one in hashes)
    assert "://" not in (FOLDER / f"{name}.txt").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(LOCKS))
def test_a_lock_has_what_the_project_asks_for(name: str) -> None:
    wanted = [Requirement(text) for extra in LOCKS[name] for text in EXTRAS[extra]]
    wanted += map(Requirement, PROJECT["dependencies"])
    if name != "cuda":
        wanted = [one for one in wanted if one.name not in ("torch", PROJECT["name"])]
    for machine in MACHINES:
        locked = versions(name, machine)
        for one in wanted:
            if one.name != PROJECT["name"] and (one.marker is None or one.marker.evaluate(machine)):
                assert Version(locked[canonicalize_name(one.name)]) in one.specifier, one


def test_locks_agree() -> None:
    """So several can be installed together."""
    for machine in MACHINES:
        everything = versions("dev", machine) | versions("cuda", machine)
        for name in LOCKS:
            assert versions(name, machine).items() <= everything.items()


def test_torch_is_one_version_with_what_it_needs() -> None:
    (line,) = [one for one in (FOLDER / "torch.txt").read_text("utf-8").splitlines() if not one.startswith("#")]
    assert Requirement(line).specifier == Requirement(f"torch=={versions('cuda', MACHINES[0])['torch']}").specifier
    needs = {canonicalize_name(Requirement(text).name) for text in requires("torch") or () if _plain(text)}
    for name in ("worker", "dev"):
        assert needs <= versions(name, MACHINES[0]).keys()


def _plain(text: str) -> bool:
    """Whether torch's build for CPUs needs it, too."""
    marker = Requirement(text).marker
    return marker is None or (Marker(str(marker)).evaluate({"extra": ""}) and "platform_system" not in str(marker))
