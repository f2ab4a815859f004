"""`infra/container/Containerfile`: by its linter, and against the code. `make image` builds the image, and runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.infra.deploy.code import native_libraries, variables
from tests.processes import ROOT

FILE = ROOT / "infra" / "container" / "Containerfile"
TEXT = FILE.read_text("utf-8")
#: Stage -> its instructions.
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", TEXT, re.MULTILINE | re.DOTALL))
#: The user's number, and the folders that it may write.
(USER,) = re.findall(r"useradd --uid (\d+)", TEXT)
FOLDERS: set[str] = set(json.loads(re.findall(r"^VOLUME (.*)$", TEXT, re.MULTILINE)[0]))


def linted(path: Path) -> str:
    linter = Path(sys.executable).with_name("hadolint")
    return subprocess.run([linter, "--no-color", path], capture_output=True, text=True).stdout


def test_the_linter_finds_nothing() -> None:
    assert linted(FILE) == ""


def test_the_linter_finds_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "Containerfile"
    wrong.write_text(TEXT.replace("--no-cache-dir ", "").replace("ENTRYPOINT [", "ENTRYPOINT tini ["))
    found = linted(wrong)
    assert "DL3042" in found
    assert "DL3025" in found


def test_its_variables_are_read() -> None:
    given = [word for line in re.findall(r"^ENV ((?:.*\\\n)*.*)$", TEXT, re.MULTILINE) for word in line.split()]
    names = {word.partition("=")[0] for word in given if "=" in word}
    assert names - variables() == {"PIP_DISABLE_PIP_VERSION_CHECK", "PIP_ROOT_USER_ACTION", "PIP_PYTHON"}


def test_both_targets_run_as_a_user_on_tini() -> None:
    for target in ("cpu", "cuda"):
        assert STAGES[target].rstrip().endswith("USER 10001:10001")
    assert 'ENTRYPOINT ["tini", "--", "penstock"]' in STAGES["runtime"]
    assert "HEALTHCHECK" not in TEXT.replace("no HEALTHCHECK", "")
    assert TEXT.rstrip().endswith(STAGES["cpu"].rstrip())  # the default


def test_every_package_is_installed_by_its_hash_but_torchs_build_for_cpus() -> None:
    installs = re.findall(r"pip install ((?:.*\\\n)*.*)$", TEXT, re.MULTILINE)
    unlocked = [words for words in installs if "--require-hashes" not in words]
    assert all("--no-deps" in words for words in installs)
    assert [words.split()[-1] for words in unlocked] == ["requirements/torch.txt", *["/wheel/penstock-*.whl"] * 2]


def listed(tmp_path: Path, names: list[str]) -> int:
    """The status of the Containerfile's check of a wheel with these files."""
    (check,) = re.findall(
        r"^RUN python -m zipfile --list (?:.*\\\n)*?    && (if grep (?:.*\\\n)*.*)$", TEXT, re.MULTILINE
    )
    (tmp_path / "files").write_text("".join(f"{name}   2026-01-01 00:00:00   1\n" for name in names))
    program = check.replace("\\\n", " ").replace("/wheel/files", str(tmp_path / "files"))
    machine = f"uname() {{ echo x86_64; }}; {program}"
    return subprocess.run(["sh", "-c", machine], capture_output=True).returncode


def test_a_wheel_without_one_of_the_libraries_that_setup_py_makes_ends_the_build(tmp_path: Path) -> None:
    """setup.py leaves a note in place of a library that did not compile."""
    built = native_libraries()
    assert built
    assert listed(tmp_path, built) == 0
    for name in built:
        note = name.removesuffix(".so") + ".txt"
        assert listed(tmp_path, [*(other for other in built if other != name), note]) != 0
    assert listed(tmp_path, []) != 0


def test_its_extras_are_ours() -> None:
    extras = re.findall(r'^ARG EXTRAS="(.*)"$', TEXT, re.MULTILINE)[0].split()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    assert set(extras) == known.keys() - {"gpu", "dev", "smollm2", "parquet"}


def test_the_context_is_what_the_build_needs() -> None:
    allowed = re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE)
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", TEXT, re.MULTILINE):
        assert [name for name in copied.split() if name != "." and name not in allowed] == []


@pytest.mark.parametrize("flag", ["-march", "-mtune", "-mcpu"])
def test_native_kernels_are_not_built_for_the_building_machine(flag: str) -> None:
    """Each library is built for a named instruction set, and the engine chooses when it starts."""
    assert flag not in (ROOT / "setup.py").read_text("utf-8")


def test_without_buildah_the_image_is_not_built_and_that_is_said(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "id"):
        (tmp_path / program).symlink_to(str(shutil.which(program)))
    check = ROOT / "infra" / "container" / "check.sh"
    ran = subprocess.run([check], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch("NOTICE: no(t root| buildah): the image is neither built nor run\n", ran.stdout)
