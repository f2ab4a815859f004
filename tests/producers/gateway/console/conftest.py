"""A browser that asks no host but this one, and pages of it that must not complain."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, Page, async_playwright, expect

from tests.producers.gateway.test_docs import BROWSERS

#: As root there is no sandbox. A whole browser asks for updates and the like by itself, and finds no host but this one.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


#: A page is as slow as its machine; what comes about sooner waits no longer.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


class Served(Protocol):
    """A gateway that runs."""

    @property
    def url(self) -> str: ...


#: Opens a page of the console by its hash; options are those of Playwright's `new_context`.
Look = Callable[..., Awaitable[Page]]


def chromium() -> str | None:
    """The machine's browser."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    executable = chromium()
    if executable is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium-headless-shell)")
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=executable, args=list(FLAGS), timeout=PATIENCE_MS)
        yield started
        await started.close()


class Complaints(list[str]):
    """What pages said on their consoles, and requests to other hosts."""

    def hear(self, page: Page, url: str) -> None:
        page.on("console", lambda message: message.type == "error" and self.append(message.text))
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or self.append(request.url))


@pytest_asyncio.fixture(loop_scope="session")
async def complaints() -> AsyncIterator[Complaints]:
    """None may be left at the end; a test that provokes some clears them."""
    heard = Complaints()
    yield heard
    assert heard == []


@pytest_asyncio.fixture(loop_scope="session")
async def look(browser: Browser, complaints: Complaints) -> AsyncIterator[Look]:
    contexts: list[BrowserContext] = []

    async def open_page(door: Served, path: str = "", **options: Any) -> Page:
        context = await browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = await context.new_page()
        complaints.hear(page, door.url)
        await page.goto(f"{door.url}/console#/{path}")
        await page.wait_for_selector("#nav a, dialog[open]")  # it knows who asks, and hears the keyboard
        return page

    yield open_page
    for context in contexts:
        await context.close()
