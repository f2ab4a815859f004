"""`/docs`: the OpenAPI document as a page to read and to try, by Swagger UI. It needs no other server."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import fastapi_offline
from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

#: The route of Swagger UI's files, to be mounted by the application.
ASSETS: Final = "/docs/assets"
#: Browsers refuse to load anything from another host for this page. Its script is in the page itself.
POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
#: All URLs are relative to /docs, so that the page also works below a proxy's prefix.
PAGE: Final = get_swagger_ui_html(
    openapi_url="openapi.json",
    title="Penstock",
    swagger_js_url="docs/assets/swagger-ui-bundle.js",
    swagger_css_url="docs/assets/swagger-ui.css",
    swagger_favicon_url="docs/assets/favicon.png",
    # Without a validator: it is another server, to which Swagger UI would send the document's URL.
    swagger_ui_parameters={"validatorUrl": None, "docExpansion": "list", "defaultModelsExpandDepth": 0},
)


def assets() -> StaticFiles:
    """Swagger UI's files, from the package that ships them."""
    return StaticFiles(directory=Path(fastapi_offline.__file__).parent / "static")


@router.get("/docs")
async def docs() -> HTMLResponse:
    """The page."""
    return HTMLResponse(PAGE.body, headers={"content-security-policy": POLICY})
