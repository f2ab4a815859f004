"""Renders a kustomization as `kubectl kustomize` does: resources, components, generated ConfigMaps, and JSON patches
(RFC 6902) inline.

What else kustomize can do, `infra/kubernetes` does without: so its overlays are checked on machines without kubectl.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jsonpatch

from tests.infra.deploy.templates import document, documents

Object = dict[str, Any]
KNOWN: Final = {"apiVersion", "kind", "resources", "components", "patches", "configMapGenerator"}
#: Hexadecimal digits in the hash of a name, and what stands for those that could make a word.
_LETTERS: Final = str.maketrans("013ae", "ghkmt")


def render(folder: Path) -> list[Object]:
    """All objects of a kustomization. Raises ValueError for what is not there, or not known here."""
    generated: dict[str, Object] = {}
    objects = _add([], folder, generated)
    names = {name: f"{name}-{_hash(one)}" for name, one in generated.items()}
    for name, one in generated.items():
        one["metadata"]["name"] = names[name]
    return [*(_named(one, names) for one in objects), *generated.values()]


def _add(objects: list[Object], folder: Path, generated: dict[str, Object]) -> list[Object]:
    file = folder / "kustomization.yaml"
    said = document(file.read_text("utf-8"))
    if unknown := said.keys() - KNOWN:
        raise ValueError(f"{file}: {sorted(unknown)} are not rendered here")
    for name in said.get("resources", ()):
        place = folder / name
        if not place.exists():
            raise ValueError(f"{file}: there is no {name}")
        more = documents(place.read_text("utf-8")) if place.is_file() else ()
        objects = _add(objects, place, generated) if place.is_dir() else [*objects, *more]
    for name in said.get("components", ()):
        objects = _add(objects, folder / name, generated)
    for one in said.get("configMapGenerator", ()):
        if (one["name"] in generated) != (one.get("behavior") == "replace"):
            raise ValueError(f"{file}: {one['name']} is generated twice, or replaces nothing")
        generated[one["name"]] = _config_map(one, folder)
    for patch in said.get("patches", ()):
        objects = _patched(objects, patch, file)
    return objects


def _patched(objects: list[Object], patch: Object, file: Path) -> list[Object]:
    target = patch["target"]
    chosen = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(chosen) != 1:
        raise ValueError(f"{file}: {len(chosen)} objects are {target}")
    steps = document(patch["patch"])
    return [jsonpatch.apply_patch(one, steps) if one is chosen[0] else one for one in objects]


def _config_map(said: Object, folder: Path) -> Object:
    data = dict(text.split("=", 1) for text in said.get("literals", ()))
    data |= {name: (folder / name).read_text("utf-8") for name in said.get("files", ())}
    metadata = {"name": said["name"], "namespace": said["namespace"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _hash(config_map: Object) -> str:
    """The end of a generated name, which changes with the content. (kustomize always takes an empty name for it.)"""
    content = {"data": config_map["data"], "kind": "ConfigMap", "name": ""}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:10].translate(_LETTERS)


def _named(one: Any, names: dict[str, str]) -> Any:
    """The same, with generated names in place of those that it refers to."""
    if isinstance(one, list):
        return [_named(each, names) for each in one]
    if not isinstance(one, dict):
        return one
    return dict(_renamed(one, names))


def _renamed(one: Object, names: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for key, value in one.items():
        if key in ("configMap", "configMapRef") and value.get("name") in names:
            yield key, value | {"name": names[value["name"]]}
        else:
            yield key, _named(value, names)
