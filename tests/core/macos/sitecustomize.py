"""A Python on Linux that has this folder in its PYTHONPATH lacks what a Mac lacks: names of modules, and /proc."""

import builtins
import functools
import importlib
import io
import mmap
import os
import resource
import select
import signal
import socket
import sys
import sysconfig

importlib.import_module("urllib.request")  # before the platform changes: a Mac has modules of its own for this and the next
sysconfig.get_config_vars()
sys.platform = "darwin"
MISSING = {
    os: ("memfd_create", "eventfd", "pidfd_open", "waitid", "sched_getaffinity", "sched_setaffinity", "posix_fallocate",
         "posix_fadvise", "pipe2", "O_PATH"),
    select: ("epoll",), mmap: ("MADV_REMOVE", "MADV_HUGEPAGE", "MAP_POPULATE"),
    resource: ("RLIMIT_MSGQUEUE", "prlimit", "RUSAGE_THREAD"),
    signal: ("pidfd_send_signal", "sigtimedwait", "SIGRTMAX", "SIGRTMIN"),
    socket: ("SO_PEERCRED", "MSG_NOSIGNAL", "TCP_INFO", "TCP_KEEPIDLE"),
}
"""Names by module; macOS has `waitid` from Python 3.13 on."""


def _without_proc(function):
    @functools.wraps(function)
    def call(path=".", *arguments, **more):
        if isinstance(path, (str, os.PathLike)) and (os.fspath(path) + "/").startswith("/proc/"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return function(path, *arguments, **more)
    return call


for module, names in MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("open", "listdir", "readlink", "stat", "scandir"):
    setattr(os, name, _without_proc(getattr(os, name)))
builtins.open = io.open = _without_proc(builtins.open)
