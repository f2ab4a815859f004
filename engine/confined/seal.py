"""Seals a process: from then on it reads its input, computes, and writes its output, and can do nothing else.

- no_new_privs: no program that it might start would get more rights.
- Limits of the kernel: no file larger than 0 bytes, no core dump, no further descriptor, no further process.
- seccomp (Linux on x86-64 and aarch64): a list of system calls for memory, time and signals, reading from descriptor 0
  and writing to descriptor 1. Any other call fails with EPERM: opening a file or socket, starting a process or thread,
  tracing or signalling another one. Memory can not be made executable, so no new native code can be loaded.

On other systems the limits alone hold. seccomp(2), and the kernel's Documentation/userspace-api/seccomp_filter.rst,
describe the filter's instructions (classic BPF).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from typing import Final

#: Descriptors that the sealed process has: input, output, errors.
DESCRIPTORS: Final = 3

# prctl(2) and seccomp(2).
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NO_NEW_PRIVS: Final = 38
_SET_MODE_FILTER: Final = 1
_TSYNC: Final = 1

# Classic BPF: load a word of seccomp_data; jump if equal, or if bits are set; return.
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _EPERM, _KILL = 0x7FFF0000, 0x00050001, 0x80000000
_PROT_EXEC: Final = 4

#: Machine -> (its AUDIT_ARCH, the number of seccomp(2), the number of each allowed call).
_MACHINES: Final = {
    "x86_64": (
        0xC000003E,
        317,
        {
            "read": 0, "write": 1, "close": 3, "fstat": 5, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
            "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "sched_yield": 24, "mremap": 25,
            "madvise": 28, "setitimer": 38, "getpid": 39, "exit": 60, "gettimeofday": 96, "getrusage": 98,
            "sigaltstack": 131, "gettid": 186, "time": 201, "futex": 202, "restart_syscall": 219,
            "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "getrandom": 318,
        },
    ),
    "aarch64": (
        0xC00000B7,
        277,
        {
            "close": 57, "lseek": 62, "read": 63, "write": 64, "fstat": 80, "exit": 93, "exit_group": 94, "futex": 98,
            "setitimer": 103, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_yield": 124,
            "restart_syscall": 128, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
            "rt_sigreturn": 139, "getrusage": 165, "gettimeofday": 169, "getpid": 172, "gettid": 178, "brk": 214,
            "munmap": 215, "mremap": 216, "mmap": 222, "mprotect": 226, "madvise": 233, "getrandom": 278,
        },
    ),
}  # fmt: skip
#: Call -> what its argument has to be: (which argument, "is" that value, or "lacks" those bits).
_ARGUMENT: Final = {
    "read": (0, "is", 0),
    "write": (0, "is", 1),
    "mmap": (2, "lacks", _PROT_EXEC),
    "mprotect": (2, "lacks", _PROT_EXEC),
}


def make_undumpable() -> None:
    """Keep other processes of this user, children among them, from reading this process's memory and environment, and
    from tracing it (Linux). No core dump is written then. A program that this process starts is as before.

    PENSTOCK_DUMPABLE=1 leaves it out, for debuggers and profilers of the same user; root's work without it.
    """
    if sys.platform == "linux" and os.environ.get("PENSTOCK_DUMPABLE") != "1":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def seal(memory: int) -> bool:
    """Seal this process, all its threads included. Import all modules before. Returns whether seccomp holds.

    `memory`: bytes of address space beside what the process has now; not every kernel has this limit.
    """
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as statm:
            pages = int(statm.read().split()[0])
        _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + memory)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    with contextlib.suppress(OSError, ValueError):
        _limit(resource.RLIMIT_NPROC, 0)
    return sys.platform == "linux" and _filter()


def _limit(resource_id: int, value: int) -> None:
    resource.setrlimit(resource_id, (value, value))


def _filter() -> bool:
    machine = _MACHINES.get(os.uname().machine)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or machine is None:
        return False
    arch, seccomp, calls = machine
    program = _program(arch, calls)
    instructions = ctypes.create_string_buffer(program)
    # struct sock_fprog: the number of instructions, and where they are.
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    libc.syscall.restype = ctypes.c_long
    failed: int = libc.syscall(ctypes.c_long(seccomp), _SET_MODE_FILTER, _TSYNC, ctypes.create_string_buffer(header))
    return failed == 0  # else the kernel has no seccomp


def _program(arch: int, calls: dict[str, int]) -> bytes:
    """The filter. The upper half of a descriptor or of protection bits is not looked at, because the kernel does not
    either."""
    lines = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for name, number in calls.items():
        if name not in _ARGUMENT:
            lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
            continue
        index, kind, value = _ARGUMENT[name]
        allowed = (_EQUAL, 0, 1, value) if kind == "is" else (_ANY_BIT, 1, 0, value)
        lines += [
            (_EQUAL, 0, 4, number),
            (_LOAD, 0, 0, _ARGUMENTS + 8 * index),
            allowed,
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ]
    lines.append((_RETURN, 0, 0, _EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in lines)
