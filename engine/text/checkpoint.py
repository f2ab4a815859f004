"""Reads the size and the version of a checkpoint from its files, without loading it. No torch."""

from __future__ import annotations

import math
from hashlib import sha256
from pathlib import Path

from engine.text.config import packed_bits, read_config
from engine.text.gguf import gguf_of, read_gguf
from engine.text.pooling import is_published_reranker
from engine.text.tensors import locate, raw_header

#: Files up to this size are hashed as a whole for the version.
WHOLE_FILE = 16 << 20
_KINDS = (".json", ".jinja", ".safetensors")
_OF_MODULES = "[0-9]*_*/*"
_PAGES = 64
_PAGE = 64 << 10
#: Name suffixes of a quantised matrix's tensors that do not hold its weights.
NO_PARAMETERS = frozenset(
    {
        *("scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx"),
        *("weight_shape", "input_scale", "input_zero_point", "bitmask", "shape"),
    }
)
#: Name suffixes of tensors that hold several numbers in one word.
PACKED = frozenset({"qweight", "weight_packed"})
#: Name suffixes of the output head, and of the embedding that it may be tied to.
HEADS = ("lm_head", "embed_tokens")


def count_parameters(folder: str | Path) -> int:
    """Count the parameters of a folder's checkpoint, from its files' headers alone. A quantised matrix counts with its
    original numbers, without scales. Raises ModelError."""
    root = Path(folder)
    plain = 0
    packed: dict[str, int] = {}
    for name, located in locate(root).items():
        matrix, _, end = name.rpartition(".")
        numbers = math.prod(located.stored.shape)
        if end in PACKED:
            packed[matrix] = numbers
        elif end == "compressed":  # of a 2:4 pruned matrix, without its zeros
            plain += 2 * numbers
        elif end not in NO_PARAMETERS:
            plain += numbers
    bits = packed_bits(read_config(root) if packed else {})
    return plain + sum(count * (32 // bits(name)) for name, count in packed.items())


def model_version(folder: str | Path) -> str:
    """The model's version: 12 hex digits that change when the model does.

    If the folder has a manifest.json, they are the beginning of its SHA-256, because it lists that of every file.
    Otherwise they are the beginning of the SHA-256 of the lines "name, size, digest", tab-separated and newline-ended,
    of the folder's *.json, *.jinja and *.safetensors files in order of name, and of those of Sentence-Transformers'
    modules (`1_Pooling/config.json`). Hidden files and others, such as a README, do not count; but where a README makes
    the model a reranker (`is_published_reranker`), a last line "README.md, reranker" does. The digest is the file's
    SHA-256 in hex. For files above 16 MiB, it covers the safetensors header (if there is one) and 64 pages of 64 KiB,
    evenly spaced from the first to the last. Reading 16 GB at each start would double the time of a cold start, and no
    training or conversion changes weights so that every page stays the same.

    A GGUF file's version is made alike, of the lines "size, digest" of its parts, and of a reranker's README: its name,
    which people change, does not count. The digest of a file above 16 MiB covers all before its weights.
    """
    root = Path(folder)
    manifest = root / "manifest.json"
    if manifest.is_file():
        return sha256(manifest.read_bytes()).hexdigest()[:12]
    listing = sha256()
    if (gguf := gguf_of(root)) is not None:
        for path, header in read_gguf(gguf).header_bytes.items():
            listing.update(f"{path.stat().st_size}\t{_digest(path, header)}\n".encode())
    else:
        names = {path.relative_to(root).as_posix(): path for path in (*root.iterdir(), *root.glob(_OF_MODULES))}
        for name, path in sorted(names.items()):
            if path.suffix in _KINDS and path.is_file() and not name.startswith("."):
                listing.update(f"{name}\t{path.stat().st_size}\t{_digest(path)}\n".encode())
    if is_published_reranker(root):
        listing.update(b"README.md\treranker\n")
    return listing.hexdigest()[:12]


def _digest(path: Path, header: int = 0) -> str:
    """A file's digest, as `model_version` describes it. `header`: the bytes before its weights, of a GGUF file."""
    size = path.stat().st_size
    if size <= WHOLE_FILE:
        return sha256(path.read_bytes()).hexdigest()
    digest = sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            digest.update(raw_header(path, file))
        digest.update(file.read(header))
        for page in range(_PAGES):
            file.seek((size - _PAGE) * page // (_PAGES - 1))
            digest.update(file.read(_PAGE))
    return digest.hexdigest()
