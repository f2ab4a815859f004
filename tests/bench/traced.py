"""A `sitecustomize` module: counts the calls of the product's functions in its process, for `tests.bench.way`.

Whoever connects to the socket `<pid>.sock` beside this file gets [command line, [(thread, file, function, calls, calls
that it made of functions of other files)]] since the last time, as JSON. `tests.bench.way` copies it into a folder,
with the packages' root in the file `root`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from socketserver import StreamRequestHandler, UnixStreamServer
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).parent
_calls: Counter[tuple[int, CodeType]] = Counter()
_onward: Counter[tuple[int, CodeType]] = Counter()


def install(root: str) -> None:
    """Count from now on, also in the threads that start later."""
    product = tuple(f"{root}/{package}/" for package in ("engine", "producers", "workers"))

    def count(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(product):
            return
        _calls[threading.get_ident(), frame.f_code] += 1
        caller = frame.f_back.f_code if frame.f_back else frame.f_code
        if caller.co_filename != file and caller.co_filename.startswith(product):
            _onward[threading.get_ident(), caller] += 1

    class Answer(StreamRequestHandler):
        def handle(self) -> None:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            found = []
            for ident, code in [*_calls]:
                where = names.get(ident, "ended"), os.path.relpath(code.co_filename, root), code.co_qualname
                found.append((*where, _calls.pop((ident, code)), _onward.pop((ident, code), 0)))
            self.wfile.write(json.dumps([sys.orig_argv, found]).encode())

    server = UnixStreamServer(str(HERE / f"{os.getpid()}.sock"), Answer)
    threading.Thread(target=server.serve_forever, name="traced", daemon=True).start()
    threading.setprofile(count)
    sys.setprofile(count)


if (HERE / "root").exists():
    install((HERE / "root").read_text())
