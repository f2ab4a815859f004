"""A system that an operator runs. Its processes are reached by pid, by pid file, or by the operator's commands.

    worker:NAME=PID     worker:NAME=/run/w1.pid (read each time)     worker:NAME (with commands for its name)

The verbs for commands are kill, pause, resume, drain (SIGTERM) and start (after kill and drain). Before each signal the
process is checked: a process that is not the declared one gets no signal.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from producers.connection.connect import connect
from workers.processes.proc import LAST, SERVER, argv_of, command_of, option
from workers.trials.chaos.checker.rest import workers_of
from workers.trials.chaos.injector import Gone, Handle, Healing
from workers.trials.chaos.plan import KINDS, PROCESSES, SERVERS, Fault, Plan

VERBS: Final = ("kill", "pause", "resume", "drain", "start")
#: Kind of fault -> the verbs that it needs.
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "kill": ("kill",),
    "pause": ("pause", "resume"),
    "drain": ("drain",),
    "restart": ("kill", "start"),
}
_SIGNALS: Final = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "resume": signal.SIGCONT, "drain": signal.SIGTERM}
#: Time limit (s) of an operator's command.
COMMAND_S: Final = 120.0


@dataclass(slots=True)
class Process:
    """One process of the system. `name`: for a worker, its `--name`. `pid`: a number, a pid file, or empty."""

    name: str
    role: str
    pid: str = ""
    commands: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, commands: Mapping[str, str]) -> Process:
        """Parse `ROLE:NAME` or `ROLE:NAME=PID`. Raises ValueError."""
        role, colon, name_and_pid = text.partition(":")
        name, _, pid = name_and_pid.partition("=")
        roles = (*(role for role in PROCESSES if role != "client"), *SERVERS)
        if not colon or role not in roles or not name:
            some = ", ".join(roles)
            raise ValueError(f"--process is {text!r}; it must be ROLE:NAME or ROLE:NAME=PID, with a role of {some}")
        if pid and not pid.isdecimal() and not Path(pid).exists():
            raise ValueError(f"--process is {text!r}; {pid} is neither a process id nor a file that holds one")
        if pid.isdecimal() and int(pid) < 1:
            raise ValueError(f"--process is {text!r}; a process id must be 1 or more")
        if not pid and not commands:
            raise ValueError(f"--process is {text!r}; give its process id (=PID), or commands with --exec")
        return cls(name, role, pid, commands)

    @property
    def process(self) -> str:
        return self.name

    def able(self, verb: str) -> bool:
        """Whether a command or a signal can do it."""
        return verb in self.commands or (bool(self.pid) and verb in _SIGNALS)

    def look(self) -> None:
        """Check the process id. Raises ValueError if it belongs to another process or user.

        A pid file may be empty or stale for a moment, so that is not an error.
        """
        if not self.pid or self.commands.keys() >= _SIGNALS.keys():
            return
        try:
            number = self._number()
            os.kill(number, 0)
        except PermissionError:
            raise ValueError(f"{self.name}, process {self.pid}, is another user's: run this as that user") from None
        except (OSError, ValueError) as error:
            if self.pid.isdecimal():
                raise ValueError(f"{self.name}: there is no process {self.pid}") from error
            return
        self._refuse_stranger(number)

    def _refuse_stranger(self, number: int) -> None:
        """Raises ValueError if the process is not the declared one."""
        argv = argv_of(number)
        command, expected = command_of(argv), SERVER if self.role in SERVERS else self.role
        if command != expected:
            state = f"runs {' '.join(argv)[:100]!r}" if argv else "has ended"
            reach = "if it is the right one, say with --exec how to reach it"
            raise ValueError(f"process {number} is not {self.role} {self.name}: it {state}; {reach}")
        called = option(argv, "--name")
        if called not in (None, self.name):
            raise ValueError(f"process {number} is {self.role} {called}, not {self.name}")

    def kill(self) -> None:
        self._do("kill")

    def pause(self) -> None:
        self._do("pause")

    def resume(self) -> None:
        self._do("resume")

    def drain(self) -> None:
        self._do("drain")

    def start(self) -> None:
        """Run the start command, if there is one. Otherwise its supervisor starts it."""
        if "start" in self.commands:
            self._do("start")

    @property
    def alive(self) -> bool:
        """Whether it runs; True without a process id."""
        if not self.pid:
            return True
        try:
            os.kill(self._number(), 0)
        except (OSError, ValueError):
            return False
        return True

    @property
    def over(self) -> bool:
        """Whether it has ended for good: a fixed process id is the only way to reach it, and it is gone."""
        return self.pid.isdecimal() and not self.commands and not self.alive

    def _do(self, verb: str) -> None:
        """Do the verb by command or signal. Raises Gone if that fails."""
        if verb in self.commands:
            template = shlex.split(self.commands[verb])
            argv = [word.replace("{name}", self.name).replace("{role}", self.role) for word in template]
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Gone(f"{shlex.join(argv)}: {error}") from error
            if done.returncode:
                raise Gone(f"{shlex.join(argv)} exited with {done.returncode}: {(done.stderr or done.stdout)[-300:]}")
            return
        try:
            number = self._number()
            self._refuse_stranger(number)
            os.kill(number, _SIGNALS[verb])
        except (OSError, ValueError) as error:
            raise Gone(f"{self.name}, process {self.pid}: {error}") from error

    def _number(self) -> int:
        """The process id. Raises OSError or ValueError, also for 0 or less, which signals many processes."""
        number = int(self.pid if self.pid.isdecimal() else Path(self.pid).read_text())
        if not 1 <= number <= LAST:
            raise ValueError(f"{self.pid} says {number}, which is not a process id")
        return number


class Operated:
    """A `workers.trials.chaos.injector.Scene` of an operator's processes. `books`: where workers' leases are."""

    def __init__(self, processes: Sequence[Process], books: str) -> None:
        self._processes = {process.name: process for process in processes}
        self._books = connect(books, timeout=2, decode=True)

    @property
    def handles(self) -> Mapping[str, Handle]:
        return self._processes

    def look(self) -> None:
        """Check all process ids. Raises ValueError for one that is not the declared process."""
        for process in self._processes.values():
            process.look()

    def check(self, plan: Plan) -> None:
        """Check a plan. Raises ValueError for a fault that cannot be done here."""
        for fault in plan.faults:
            if fault.target not in self._processes:
                raise ValueError(f"the plan names {fault.target}, which no --process does")
            if fault.kind not in NEEDS or fault.target not in itertools.chain(*self.targets(fault.kind).values()):
                raise ValueError(
                    f"the plan has {fault.kind} of {fault.target}, which cannot be done to it from outside"
                )

    def targets(self, kind: str) -> dict[str, list[str]]:
        """Role -> names of the processes to which this kind of fault can be done."""
        targets: dict[str, list[str]] = {}
        for process in self._processes.values():
            if process.role in KINDS[kind].roles and all(map(process.able, NEEDS.get(kind, ("nothing",)))):
                targets.setdefault(process.role, []).append(process.name)
        return targets

    def fits(self, fault: Fault) -> bool:
        """Whether the target is up and, for a worker, another worker too. True for a target that has ended for good."""
        target = self._processes[fault.target]
        if target.over:
            return True
        if target.role != "worker":
            return target.alive
        try:
            names = {str(lease["worker"]) for lease in workers_of(self._books) if not lease.get("draining")}
        except RedisError:
            return False
        return target.alive and target.name in names and len(names) > 1

    def begin(self, fault: Fault) -> Healing | None:
        target = self._processes[fault.target]
        if fault.kind != "restart":
            raise ValueError(f"{fault.kind} cannot be done to a system from outside")
        target.kill()
        return target.start

    def after(self, fault: Fault) -> None:
        """Start the target again, if there is a command for it."""
        self._processes[fault.target].start()


def say_plan(describe: Callable[[str], None], faults: Sequence[Fault], processes: Sequence[Process]) -> None:
    """Describe each planned fault in a line."""
    by_name = {process.name: process for process in processes}
    for fault in faults:
        target = by_name[fault.target]
        lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
        where = f" (process {target.pid})" if target.pid else ""
        describe(f"{fault.at:8.1f} s  {fault.kind} {target.role} {target.name}{where}{lasts}")
