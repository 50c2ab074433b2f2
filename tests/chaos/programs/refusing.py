"""A command whose kernel refuses some system calls: `python refusing.py ERRNO COMMAND...`, as in old containers and gVisor.

The filter (seccomp) also holds for all processes that the command starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

NUMBERS = {"x86_64": {"memfd_create": 319, "eventfd2": 290, "pidfd_open": 434, "pidfd_send_signal": 424},
           "aarch64": {"memfd_create": 279, "eventfd2": 19, "pidfd_open": 434, "pidfd_send_signal": 424}}
"""The numbers of the system calls that are refused, by machine."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|BPF_W|BPF_ABS, BPF_JMP|BPF_JEQ|BPF_K, BPF_RET|BPF_K
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def refuse(error: int) -> None:
    """Let the kernel refuse the system calls with an error code, from now on."""
    numbers = list(NUMBERS[platform.machine()].values())
    steps = [(_LOAD, 0, 0, 0)]  # the number of the system call
    steps += [(_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    program = _Program(len(steps), b"".join(struct.pack("=HBBI", *step) for step in steps))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "this system has no seccomp")


if __name__ == "__main__":
    refuse(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
