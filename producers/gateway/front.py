"""`/`: a page for people who open the gateway in a browser."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter(tags=["health"])

#: The page; it loads nothing from other servers.
PAGE: Final = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Penstock</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40em; margin: 3em auto; padding: 0 1em }}</style>
<h1>Penstock {version("penstock")}</h1>
<p>Language models behind a queue. This is its gateway: it takes tasks over HTTP, and workers run them.</p>
<ul>
<li><a href="/v1/models">/v1/models</a>: the models that there are
<li><code>POST /v1/chat/completions</code>, <code>POST /v1/completions</code>: as OpenAI's
<li><code>POST /v1/tasks</code>: submit, leave, come back
<li><a href="/docs">/docs</a>: all of it, to read and to try; <a href="/openapi.json">/openapi.json</a>: for tools
<li><a href="/readyz">/readyz</a>, <a href="/livez">/livez</a>, <a href="/metrics">/metrics</a>: for machines
</ul>
</html>
"""


@router.get("/", response_class=HTMLResponse)
async def front() -> HTMLResponse:
    """A page that says what this server is and links to its endpoints."""
    return HTMLResponse(PAGE)
