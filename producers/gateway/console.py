"""`/console`: pages for operators, and a playground, in a browser. All that they show is JSON of documented endpoints.

    /console ─▶ static/index.html ─▶ /console/assets/*: modules, a style sheet ─▶ /v1/... with the caller's key

The pages need no key, the endpoints do: whoever opens them sees what the key may see that they type in, which is kept
in the page's memory alone. Nothing is built: the browser loads the modules as they stand in `static/`. Texts of
others (names, prompts, outputs) become text nodes and never markup; the policy would run none of it either way, and
trusted types refuse what a later change might do by mistake.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from fastapi import APIRouter, HTTPException, Request, Response

from producers.gateway.http.edge import CONSOLE_ASSETS

STATIC: Final = Path(__file__).parent / "static"
TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGE: Final = "index.html"
HEADERS: Final = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
}
router = APIRouter(include_in_schema=False)


@router.get("/console")
async def page() -> Response:
    """The page, which loads the rest."""
    return Response(_file(PAGE)[0], media_type="text/html; charset=utf-8", headers=HEADERS)


@router.get(f"{CONSOLE_ASSETS}{{name}}")
async def asset(request: Request, name: str) -> Response:
    """A file of the page. It is in memory once, as those of /docs."""
    if name not in _names():
        raise HTTPException(404)
    content, tag = _file(name)
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"etag": tag})
    return Response(content, media_type=TYPES[Path(name).suffix], headers={"etag": tag, "cache-control": "no-cache"})


@cache
def _names() -> frozenset[str]:
    return frozenset(path.name for path in STATIC.iterdir() if path.suffix in TYPES)


@cache
def _file(name: str) -> tuple[bytes, str]:
    """A file, and its entity tag."""
    content = (STATIC / name).read_bytes()
    return content, f'"{sha256(content).hexdigest()[:32]}"'
