"""No test lets anything look for another host: where root starts them, all tests run in a network of their own.

It has the loopback interface alone, so nothing leaves it, whatever browsers, clients or servers a machine has. A name
server on loopback, at the addresses of /etc/resolv.conf, knows no name and keeps what it was asked for. If any name was
asked for, or a packet had no way, the run fails and says so. Without root the tests run in the machine's network, and
the header says that this is not checked.
"""

from __future__ import annotations

import ctypes
import fcntl
import re
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

#: From <sched.h>, <net/if.h> and <linux/sockios.h>.
CLONE_NEWNET: Final = 0x40000000
IFF_UP: Final = 1
SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x8914, 0x8916, 0x891C
#: Lookups of these are part of a test that nothing is found.
EXPECTED: Final = re.compile(r"\.(invalid|test|example)$")


class Network:
    """A network of this process and of all that it starts from now on."""

    def __init__(self, resolv: str) -> None:
        """Call it once the process is in a network namespace of its own. `resolv`: the text of /etc/resolv.conf. Raises
        OSError where its interface may not be set up."""
        self.names = Counter[str]()
        """Names that were asked for."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
            servers = re.findall(r"^nameserver\s+([\d.]+)$", resolv, re.MULTILINE)
            for number, server in enumerate(servers):
                if not server.startswith("127."):
                    for request, text in ((SIOCSIFADDR, server), (SIOCSIFNETMASK, "255.255.255.255")):
                        address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
                        fcntl.ioctl(control, request, struct.pack("16s16s", f"lo:{number}".encode(), address))
        for server in servers or ["127.0.0.1"]:
            listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            listener.bind((server, 53))
            threading.Thread(target=self._answer, args=(listener,), daemon=True).start()

    def _answer(self, listener: socket.socket) -> None:
        """Answer each question that there is no such name."""
        while True:
            question, sender = listener.recvfrom(4096)
            with suppress(IndexError, UnicodeDecodeError, OSError):
                self.names[_name(question)] += 1
                # The question again, with the flags of an answer, and 3: no such name.
                listener.sendto(question[:2] + b"\x81\x83" + question[4:6] + bytes(6) + question[12:], sender)

    def lost(self) -> int:
        """Packets to other hosts: none had a way."""
        heads, counts = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines()[:2])
        return int(dict(zip(heads, counts, strict=True))["OutNoRoutes"])

    def faults(self) -> list[str]:
        """A line for each name that was looked for, and for lost packets."""
        names = [name for name in sorted(self.names) if not EXPECTED.search(name)]
        lines = [f"a test let something look for the host {name} ({self.names[name]} times)" for name in names]
        if lost := self.lost():
            lines.append(f"tests sent {lost} packets to other hosts")
        return lines


def _name(question: bytes) -> str:
    """The name that a DNS message asks for."""
    labels, at = list[str](), 12
    while size := question[at]:
        labels.append(question[at + 1 : at + 1 + size].decode().lower())
        at += 1 + size
    return ".".join(labels)


_network: Network | None = None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before the processes of pytest-xdist start, which are in it, too."""
    global _network
    if hasattr(config, "workerinput"):
        return
    unshare = getattr(ctypes.CDLL(None), "unshare", None)  # Linux has it
    if unshare is not None and unshare(CLONE_NEWNET) == 0:
        resolv = Path("/etc/resolv.conf")
        _network = Network(resolv.read_text() if resolv.exists() else "")


def pytest_report_header(config: pytest.Config) -> list[str]:
    if _network is not None or hasattr(config, "workerinput"):
        return []
    return ["Without root it is not checked whether tests look for other hosts."]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _network is not None and _network.faults() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _network.faults() if _network is not None else ():
        terminalreporter.write_line(f"FAILED: {line}", red=True)
