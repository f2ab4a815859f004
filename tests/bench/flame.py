"""Where the time of a step goes, as a flame graph: an SVG that is small and runs no script.

    py-spy record --native -F -r 50 -d 60 -f raw -o STACKS -- .venv/bin/python -m engine.bench --model DIR \
        --workload W8 --repeats 1 --threads 1 --kernels native
    python -m tests.bench.flame STACKS --title TITLE --out OUT.svg

py-spy (pip install py-spy) writes a line for each stack: frames from the outermost on, ";" between, and how often it
was seen. What is below the frame `--below` is drawn, widths by counts; parts narrower than `--least` are left out.
With one thread all of the work is on the stack that steps.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

_WIDTH, _ROW, _TOP = 1100, 17, 46
#: Of a letter, at the size that is drawn.
_LETTER = 6.1
_COLOURS = {"python": "#9ecae9", "native": "#f4b183", "torch": "#d9b3e6"}


@dataclass(slots=True)
class Frame:
    count: int = 0
    below: dict[str, Frame] = field(default_factory=dict)

    def height(self, least: float) -> int:
        return 1 + max((frame.height(least) for frame in self.below.values() if frame.count >= least), default=0)


def tree(lines: Iterable[str], top: str) -> Frame:
    """Of all stacks that have a frame of the function `top`, from there on. Raises ValueError where none has."""
    root = Frame()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        begin = next((i for i, frame in enumerate(frames) if frame.split(" ")[0] == top), None)
        if begin is None:
            continue
        at = root
        at.count += int(count)
        for frame in frames[begin:]:
            at = at.below.setdefault(known(frame), Frame())
            at.count += int(count)
    if not root.count:
        raise ValueError(f"no stack has a function {top!r}")
    return root


def svg(title: str, root: Frame, least: float) -> str:
    least *= root.count
    rows = root.height(least) - 1
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_TOP + rows * _ROW + 8}" '
        f'font-family="monospace" font-size="10"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="6" y="20" font-size="14" font-family="sans-serif">{escape(title)}</text>',
    ]
    for i, (kind, colour) in enumerate(_COLOURS.items()):
        parts.append(f'<rect x="{6 + 90 * i}" y="29" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{20 + 90 * i}" y="38">{kind}</text>')

    def draw(frame: Frame, x: float, row: int) -> None:
        for name, one in sorted(frame.below.items(), key=lambda item: -item[1].count):
            if one.count < least:
                continue
            wide, share = _WIDTH * one.count / root.count, 100 * one.count / root.count
            y = _TOP + row * _ROW
            label = short(name)
            room = int((wide - 6) / _LETTER)
            parts.append(
                f'<g><title>{escape(label)}: {share:.1f}%</title><rect x="{x:.1f}" y="{y}" width="{wide:.1f}" '
                f'height="{_ROW - 1}" fill="{_COLOURS[kind_of(name)]}" stroke="white"/>'
            )
            if room > 2:
                parts.append(f'<text x="{x + 3:.1f}" y="{y + 12}">{escape(label[:room])}</text>')
            parts.append("</g>")
            draw(one, x, row + 1)
            x += wide

    draw(root, 0.0, 0)
    return "\n".join([*parts, "</svg>"]) + "\n"


def known(frame: str) -> str:
    """Without a line, and for an address without a name what it is of: oneDNN writes its products at run time."""
    function, _, where = frame.rpartition(" (")
    where = re.sub(r":\d+\)$", ")", where)
    if function.startswith("0x"):
        function = "machine code" if where == "?)" else where.rstrip(")")
    return f"{function} ({where}"


def kind_of(frame: str) -> str:
    if ".py" in frame:
        return "python"
    return "native" if "_avx" in frame else "torch"


def short(frame: str) -> str:
    """The function, and of Python's the file."""
    function, _, where = frame.rpartition(" (")
    function = re.sub(r"\(.*|::_FUN|::\{lambda.*", "", function)
    return f"{function} ({Path(where).name.rstrip(')')})" if ".py" in where else function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stacks", type=Path)
    parser.add_argument("--below", default="Pipeline.step")
    parser.add_argument("--title", required=True)
    parser.add_argument("--least", type=float, default=0.004)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(svg(args.title, tree(args.stacks.read_text().splitlines(), args.below), args.least))


if __name__ == "__main__":
    main()
