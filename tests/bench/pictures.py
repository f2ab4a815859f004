"""Makes the pictures of README and docs anew: `make pictures`, or `python -m tests.bench.pictures`.

`penstock up` serves SmolLM2 with four sequences at once. For a quarter of an hour, which is as long as the overview's
charts are, tenants submit tasks of all tiers, in waves of more than it can take. Another `up` serves tiny, which is
rolled out to a copy of itself under load. Then Chromium opens the console's pages. Pictures have 256 colours each: a
third of the bytes, and the same to the eye.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import math
import random
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from playwright.async_api import Browser, async_playwright

from tests.bench.rolled import UP, System, copied, rollout
from tests.processes import ROOT
from tests.producers.gateway.console.conftest import FLAGS, chromium

MODEL = "smollm2"
#: Four sequences at once, and a KV cache of which one sees what they hold.
SERVED = ("--model", MODEL, "--max-num-seqs", "4", "--kv-cache-bytes", str(256 << 20))
PROMPTS = (
    "Write a long story about a fox and a river.",
    "Explain how a heat pump works, step by step.",
    "List ten ideas for a birthday party, with a sentence on each.",
    "Summarise the history of the bicycle.",
)
TENANTS, TIERS = (
    ("acme", "acme", "acme", "globex", "globex", "initech"),
    ("priority", "default", "default", "flex", "batch"),
)
#: Seconds between two waves, and most tasks that wait at the height of one.
WAVE_S, WAVE = 240.0, 30
#: Colours of a picture, and how many of them are for what has few pixels and a colour of its own.
COLOURS, RARE = 256, 96
PIXELS = """async (png) => {
  const blob = await (await fetch(`data:image/png;base64,${png}`)).blob();
  const image = await createImageBitmap(blob);
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  let text = "";
  for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
  return [image.height, image.width, btoa(text)];
}"""


@dataclass(frozen=True)
class Picture:
    """A page of the console. `shown`: a selector of what has to be there."""

    name: str
    path: str
    shown: str
    width: int
    height: int
    dark: bool = False


class Load(threading.Thread):
    """Tenants that submit tasks, in waves, until it is stopped. It ends with the gateway's first refusal."""

    def __init__(self, http: httpx.Client) -> None:
        super().__init__(daemon=True)
        self._http, self._random, self._over = http, random.Random(1), threading.Event()

    def run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(0.5):
            height = math.sin(math.pi * (time.monotonic() - began) / WAVE_S) ** 4
            missing = 3 + WAVE * height - self._http.get("/v1/overview").json()["totals"]["waiting"]
            for _ in range(min(3, math.ceil(missing))):
                self.submit()

    def submit(self, **fields: Any) -> str:
        draw = self._random
        body = {
            "model": MODEL,
            "tenant": draw.choice(TENANTS),
            "tier": draw.choice(TIERS),
            "messages": [{"role": "user", "content": draw.choice(PROMPTS)}],
            "max_tokens": draw.choice((60, 120, 200)),
            **({"timeout": 2} if draw.random() < 0.04 else {}),  # some have no patience, and fail
            **fields,
        }
        answer = self._http.post("/v1/tasks", json=body).raise_for_status()
        return str(answer.json()["id"])

    def stop(self) -> None:
        self._over.set()
        self.join(60)


async def take(browser: Browser, url: str, picture: Picture, folder: Path) -> None:
    """Write a picture of a page into the folder."""
    size, scheme = {"width": picture.width, "height": picture.height}, "dark" if picture.dark else "light"
    context = await browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page = await context.new_page()
    await page.goto(f"{url}/console#/{picture.path}")
    await page.wait_for_selector(picture.shown, timeout=60_000)
    await page.wait_for_timeout(2500)  # lists, which come after the first answer
    png = base64.b64encode(await page.screenshot()).decode()
    await context.close()
    blank = await browser.new_page()
    height, width, data = await blank.evaluate(PIXELS, png)
    await blank.close()
    rgba = np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)
    (folder / f"{picture.name}.png").write_bytes(encoded(rgba[..., :3]))
    print(picture.name, flush=True)


def encoded(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG with a palette. `pixels`: [height, width, 3]."""
    height, width, _ = pixels.shape
    colours, index, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    numbers = colours.astype(np.int32)
    palette = numbers[np.argsort(-counts)[: COLOURS - RARE]]
    distances = ((numbers[:, None] - palette[None]) ** 2).sum(-1).min(1)
    for _ in range(RARE):  # the colour that has been met least well
        palette = np.concatenate([palette, numbers[[distances.argmax()]]])
        distances = np.minimum(distances, ((numbers - palette[-1]) ** 2).sum(-1))
    nearest = ((numbers[:, None] - palette[None]) ** 2).sum(-1).argmin(1).astype(np.uint8)
    rows = np.zeros((height, 1 + width), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = nearest[index.reshape(height, width)]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            chunk(b"PLTE", palette.astype(np.uint8).tobytes()),
            chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            chunk(b"IEND", b""),
        )
    )


async def look(url: str, pictures: Sequence[Picture], folder: Path) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        for picture in pictures:
            await take(browser, url, picture, folder)
        await browser.close()


def under_load(minutes: float, folder: Path) -> None:
    """Pictures of SmolLM2 under load."""
    with tempfile.TemporaryDirectory() as name:
        system = System(Path(name), *SERVED)
        try:
            with httpx.Client(base_url=system.url, timeout=120) as http:
                load = Load(http)
                load.start()
                time.sleep(60 * minutes)
                worker = http.get("/v1/fleet").json()["workers"][0]["id"]
                waits = load.submit(tenant="globex", tier="batch", timeout=600)
                pictures = (
                    Picture("task-light", f"tasks/{waits}", ".gantt", 1280, 800),
                    Picture("overview-light", "", ".tile", 1440, 900),
                    Picture("overview-dark", "", ".tile", 1440, 900, dark=True),
                    Picture("overview-wall-dark", "", ".tile", 2560, 1440, dark=True),
                    Picture("worker-light", f"workers/{worker}", ".cells", 1280, 700),
                    Picture("phone-light", "tasks", "tbody tr", 390, 844),
                )
                asyncio.run(look(system.url, pictures, folder))
                load.stop()
        finally:
            system.stop()


def rolled_out(folder: Path) -> None:
    """A picture of a rollout that judged."""
    with tempfile.TemporaryDirectory() as name:
        system = System(Path(name), *UP)
        try:
            print(json.dumps(asyncio.run(rollout(system, copied(Path(name), 1)))), flush=True)
            picture = Picture("rollout-light", "models?model=tiny", "svg.between", 1280, 1660)
            asyncio.run(look(system.url, [picture], folder))
        finally:
            system.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="of load, before the pictures")
    parser.add_argument("--only", choices=("load", "rollout"), help="the pictures of one of them alone")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "img", help="where the pictures go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.only != "load":
        rolled_out(options.out)
    if options.only != "rollout":
        under_load(options.minutes, options.out)


if __name__ == "__main__":
    main()
