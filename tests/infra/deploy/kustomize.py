"""Renders a kustomization as `kubectl kustomize` does: resources, components, and JSON patches (RFC 6902) inline.

What else kustomize can do, `infra/kubernetes` does without: so its overlays are checked on machines without kubectl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonpatch
import yaml

KNOWN = {"apiVersion", "kind", "resources", "components", "patches"}


def render(folder: Path) -> list[dict[str, Any]]:
    """All objects of a kustomization. Raises ValueError for what is not there, or not known here."""
    return _add([], folder)


def _add(objects: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    file = folder / "kustomization.yaml"
    said = yaml.safe_load(file.read_text("utf-8"))
    if unknown := said.keys() - KNOWN:
        raise ValueError(f"{file}: {sorted(unknown)} are not rendered here")
    for name in said.get("resources", ()):
        place = folder / name
        if not place.exists():
            raise ValueError(f"{file}: there is no {name}")
        objects = _add(objects, place) if place.is_dir() else [*objects, *yaml.safe_load_all(place.read_text("utf-8"))]
    for name in said.get("components", ()):
        objects = _add(objects, folder / name)
    for patch in said.get("patches", ()):
        objects = _patched(objects, patch, file)
    return objects


def _patched(objects: list[dict[str, Any]], patch: dict[str, Any], file: Path) -> list[dict[str, Any]]:
    target = patch["target"]
    chosen = [one for one in objects if (one["kind"], one["metadata"]["name"]) == (target["kind"], target["name"])]
    if len(chosen) != 1:
        raise ValueError(f"{file}: {len(chosen)} objects are {target}")
    steps = yaml.safe_load(patch["patch"])
    return [jsonpatch.apply_patch(one, steps) if one is chosen[0] else one for one in objects]
