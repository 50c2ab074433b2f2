"""The worker group of another host, as the launcher sees it: a remote shell with an agent behind it.

The remote shells by which the launcher reaches other hosts: ssh, srun, or a program like ssh.

The command line on the other host contains no secrets: the program (`bootstrap.py`), the environment and the job's key
are sent over standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from hvdlite._version import __version__
from hvdlite.core.config import environment_name
from hvdlite.core.errors import ProtocolError
from hvdlite.core.own_programs import NOT_HERE
from hvdlite.core.system_limits import explained
from hvdlite_runner.host.processes import exit_code
from hvdlite_runner.messages import (
    PING_SECONDS,
    QUIET,
    AgentDone,
    AgentFrames,
    AgentReady,
    Event,
    Order,
    Ping,
    frame,
)
from hvdlite_runner.placement import Host

CONNECT_SECONDS: Final = 10
BOOTSTRAP: Final = NOT_HERE + "exec(eval(sys.stdin.buffer.raw.readline()))"
"""A program that reads one line, unbuffered, which contains another program as a Python string."""
PROBLEM_CODE: Final = 96
"""The exit code of an agent bootstrap that has reported a problem."""
SSH_DEFAULTS: Final = str(Path(__file__).with_name("ssh_config"))
"""A configuration of ssh that includes the user's and the system's, and adds defaults."""

_NOT_FORWARDED: Final = re.compile(
    r"HOME|USER|LOGNAME|SHELL|HOSTNAME|PWD|OLDPWD|SHLVL|_|TERM|COLUMNS|LINES|DISPLAY|XAUTHORITY|LS_COLORS|MAIL|TMPDIR"
    r"|(SSH|XDG|DBUS|GPG|SLURM|SLURMD|PMI|PMIX|OMPI|PRTE|GNOME|TMUX|STY|KUBERNETES|BASH_FUNC)(_.*)?"
    r"|.*CUDA_VISIBLE_DEVICES")
"""Variables that describe the launcher's host, session or task, and would be wrong elsewhere."""


@dataclasses.dataclass(frozen=True)
class Shell:
    """A way to execute something on another host.

    Attributes:
        program: "ssh", "srun", or the path of a program that is called like ssh: program HOST COMMAND.
    """

    program: str = "ssh"
    port: int | None = None
    identity: str | None = None
    arguments: tuple[str, ...] = ()  # the user's options come first: ssh uses the first value of an option
    python: str = "python3"
    silence: float = 30.0  # seconds after which both sides count a link as cut (the knob `agent_timeout`); may be infinite

    @property
    def name(self) -> str:
        """The shell's name in messages."""
        return PurePath(self.program).name

    @property
    def ssh_arguments(self) -> list[str]:
        """The user's arguments for ssh."""
        return [*self.arguments, *(["-p", str(self.port)] if self.port is not None else []),
                *(["-i", self.identity] if self.identity is not None else [])]

    def command(self, host: str) -> list[str]:
        """Return the command line that starts an agent bootstrap on a host."""
        words = [self.python, "-c", BOOTSTRAP]
        if self.name == "srun":
            return srun_command(host, self.arguments, words, self.program)
        if self.name == "ssh":
            return ssh_command(host, self.ssh_arguments, words, self.program)
        return [self.program, *self.arguments, host, shlex.join(words)]


def ssh_command(host: str, arguments: Sequence[str], words: Sequence[str], program: str = "ssh") -> list[str]:
    """Return a command line for ssh that asks no questions, and leaves it to hvdrun to notice a cut link.

    An unknown host is added to the known hosts, unless the user's configuration says otherwise; a host whose key has changed
    is refused. With a configuration of the user's own (-F), only that one counts.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_SECONDS}", "LogLevel=ERROR", "ServerAliveInterval=0"]
    defaults = [] if any(word.startswith("-F") for word in arguments) else ["-F", SSH_DEFAULTS]
    return [program, "-T", *arguments, *defaults, *(word for option in options for word in ("-o", option)), "--", host,
            shlex.join(words)]


def srun_command(host: str, arguments: Sequence[str], words: Sequence[str], program: str = "srun") -> list[str]:
    """Return a command line for one task on a node of this allocation, with all the job's resources there.

    `--overlap`: the step shares the allocation with the batch script's own. Only hvdlite binds ranks to cores.
    """
    return [program, "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--mem=0", "--cpu-bind=none",
            "--mpi=none", "--quiet", "--unbuffered", *arguments, *words]


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that go to other hosts: all but those that belong to this host, session or task."""
    return {name: value for name, value in environ.items() if not _NOT_FORWARDED.fullmatch(name)}


def explain(shell: Shell, host: str, code: int, errors: str) -> str:
    """Return one line with the reason why a host could not be reached, and advice.

    Args:
        code: the remote shell's exit code.
        errors: its output on standard error.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    ours = [line.removeprefix("hvdlite: ") for line in lines if line.startswith("hvdlite: ")]
    if code == PROBLEM_CODE and ours:
        return f"host {host} {ours[-1]}" if not ours[-1].startswith("/") else f"host {host}: {ours[-1]}"
    port = f"port {shell.port or 22}"
    for sign, meaning in _ERROR_PATTERNS:
        if sign.search(errors):
            return f"host {host} " + meaning.format(host=host, port=port, python=shell.python, ssh=shell.name)
    last = lines[-1] if lines else "it said nothing"
    return f"host {host} cannot be reached by {shell.name} (exit code {code}): {last}"


_ERROR_PATTERNS: Final = tuple((re.compile(pattern, re.IGNORECASE), meaning) for pattern, meaning in (
    ("could not resolve|name or service not known|temporary failure in name resolution",
     "cannot be resolved: check the name in -H or --hostfile, DNS, /etc/hosts, and the aliases in ~/.ssh/config"),
    ("host identification has changed",
     "shows another key than the one in known_hosts: it was set up anew, or somebody is in between; if it was, "
     "forget the old key with: ssh-keygen -R {host}"),
    ("no .*host key is known for|host key verification failed",
     "is not in known_hosts, and your ssh configuration does not let hvdrun add it (StrictHostKeyChecking): check its key, "
     "and log in once with {ssh} {host}"),
    ("permission denied", "does not let you in without a password: try `ssh-copy-id {host}`, or name a key with "
     "--ssh-identity-file FILE"),
    ("connection refused", "refuses connections to {port}: is sshd running there? another port: --ssh-port PORT"),
    ("connection timed out|operation timed out|timed out during|connection to .* timed out",
     "does not answer at {port}: it is down, or a firewall drops packets; another port: --ssh-port PORT"),
    ("no route to host|network is unreachable", "cannot be reached: no route to it from here"),
    (r"identity file .* not accessible", "cannot be reached: the file of --ssh-identity-file does not exist"),
    ("invalid node name|not in this job|unable to create step|requested node configuration",
     "takes no step of this Slurm allocation; compare `scontrol show hostnames` with -H"),
    (r"command not found|: not found|no such file or directory",
     "has no {python}; name the Python there with --remote-python PATH"),
))


AGENT_TIMEOUT: Final = environment_name("agent_timeout")
_CLOSE_SECONDS: Final = 2.0  # for a remote shell whose agent has ended: srun informs its controller
_EXIT_SECONDS: Final = 1.0  # for one that has closed its output
_LOOK_SECONDS: Final = 0.01
_WRITE_BYTES: Final = 1 << 16
_ERROR_BYTES: Final = 1 << 16  # the last ones of a remote shell's standard error that are read


class RemoteAgent:
    """An agent on another host.

    Args:
        selector: its keys' `data` are functions to call when the descriptor is ready.
        receive: called with (this, event).
        lost: called with this when the link has ended without `AgentDone`.

    Attributes:
        pid: the remote shell's process id.
    """

    def __init__(self, host: Host, shell: Shell, bootstrap_input: bytes, selector: selectors.BaseSelector,
                 receive: Callable[[RemoteAgent, Event], None], lost: Callable[[RemoteAgent], None]) -> None:
        self.host = host
        self.shell = shell
        self.ready: AgentReady | None = None
        self.over = False  # all processes there have ended, or the link has
        self._selector = selector
        self._receive_event = receive
        self._lost = lost
        self._frames = AgentFrames(events=True)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._lock = threading.Lock()  # of the shell's standard input, and of `_unsent`
        self._unsent = bytearray()
        self._reason = ""
        self._quiet_since: float | None = None  # when the user was informed that it is silent
        self.last_received = time.monotonic()
        with explained(f"{shell.name} to connect to host {host.name}"):
            self._process = subprocess.Popen(shell.command(host.name), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                             stderr=self._errors, bufsize=0, start_new_session=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None and self._process.stdin is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        os.set_blocking(self._process.stdin.fileno(), False)
        selector.register(self._process.stdout, selectors.EVENT_READ, self._receive)
        self._write(bootstrap_input)

    @property
    def has_ended(self) -> bool:
        """Whether the remote shell has ended."""
        return self._process.poll() is not None

    def send(self, order: Order) -> None:
        """Send an order, unless the host is lost."""
        if not self.over:
            self._write(frame(order))

    def ping(self) -> None:
        """Send a ping, unless other orders wait to be sent; called by another thread."""
        if not self.over and self._lock.acquire(blocking=False):
            try:
                if not self._unsent and self._process.stdin is not None and not self._process.stdin.closed:
                    os.write(self._process.stdin.fileno(), frame(Ping()))  # short: all of it, or nothing
            except OSError:
                pass  # the pipe is full, or the reader notices its end
            finally:
                self._lock.release()

    def timed_out(self, now: float) -> bool:
        """Whether the last message is too old; check after reading."""
        return not self.over and self.ready is not None and now - self.last_received > self.shell.silence

    def silence_note(self, now: float) -> str:
        """Return a line for the user when a silence has lasted some seconds, and when it has ended; else ""."""
        if self.over or self.ready is None:
            return ""
        if self._quiet_since is None and now - self.last_received > QUIET:
            self._quiet_since = self.last_received
            end = ("it is waited for without end" if math.isinf(self.shell.silence)
                   else f"it counts as lost after {self.shell.silence:g} s")
            return f"host {self.host.name} has been silent for {now - self.last_received:.0f} s; {end} ({AGENT_TIMEOUT})"
        if self._quiet_since is not None and self.last_received > self._quiet_since:
            lasted, self._quiet_since = self.last_received - self._quiet_since, None
            return f"host {self.host.name} is heard again after {lasted:.0f} s"
        return ""

    def mark_lost(self, reason: str) -> None:
        """Count the host as lost."""
        self._reason = reason
        self.close()

    def failure_reason(self) -> str:
        """Return the reason for the end of the link."""
        if self._reason:
            return f"host {self.host.name} {self._reason}"
        code = self._process.wait() if self._end_shell(_EXIT_SECONDS) else None  # None: it closed its output only
        self._errors.seek(max(0, os.fstat(self._errors.fileno()).st_size - _ERROR_BYTES))
        errors = self._errors.read().decode(errors="replace")
        if self.ready is None and code is not None:
            return explain(self.shell, self.host.name, code, errors)
        lines = [line.strip() for line in errors.splitlines() if line.strip()]
        last = f": {lines[-1]}" if lines else ""
        if code is None:
            return f"host {self.host.name}: {self.shell.name} closed its output and did not end{last}"
        return f"host {self.host.name} was lost: {self.shell.name} ended with code {code}{last}"

    def close(self) -> None:
        """End the remote shell; its agent then ends by itself."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        gracefully, self.over = self.over and not self._reason, True
        assert self._process.stdout is not None
        for end in (self._process.stdout, self._process.stdin):
            if end.fileno() in self._selector.get_map():
                self._selector.unregister(end)
        with self._lock:
            self._process.stdin.close()
        self._end_shell(_CLOSE_SECONDS if gracefully else 0.0)
        self._process.stdout.close()

    def _end_shell(self, seconds: float) -> bool:
        """Wait for the remote shell and kill what is left in its group; return whether it has ended by itself."""
        until = time.monotonic() + seconds
        while (is_alive := exit_code(self._process) is None) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        if self._process.returncode is None:  # not reaped: no other group has its id
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        return not is_alive

    def _write(self, content: bytes) -> None:
        with self._lock:
            self._unsent += content
        self._push()

    def _push(self) -> None:
        """Write what the shell takes now; the selector waits until it takes the rest."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        is_waiting = stdin.fileno() in self._selector.get_map()
        with self._lock:
            try:
                while self._unsent:
                    del self._unsent[:os.write(stdin.fileno(), self._unsent[:_WRITE_BYTES])]
                    if is_waiting:  # the link was full, and moves; the answer to a ping waits behind this
                        self.last_received = time.monotonic()
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()  # the reader notices its end
            is_unsent = bool(self._unsent)
        if is_unsent and not is_waiting:
            self._selector.register(stdin, selectors.EVENT_WRITE, self._push)
        elif is_waiting and not is_unsent:
            self._selector.unregister(stdin)

    def _receive(self) -> None:
        assert self._process.stdout is not None
        content = self._process.stdout.read(1 << 18)
        if content is None:
            return
        try:
            events = self._frames.feed(content)
        except ProtocolError as error:
            self._reason = f"sent something that is no message: {error}"
            events, content = [], b""
        for event in events:
            if isinstance(event, AgentReady):
                self.ready = event
            if isinstance(event, AgentDone) and event.reason:
                self._reason, content = f"was lost: its agent has ended: {event.reason}", b""
            else:
                self.over |= isinstance(event, AgentDone)
                self._receive_event(self, event)
        self.last_received = time.monotonic()  # the current time: `receive` may have blocked on the terminal
        if not content:
            self._selector.unregister(self._process.stdout)
            if not self.over:
                self.over = True
                self._lost(self)


def bootstrap_input(directory: str, environ: Mapping[str, str], silence: float) -> bytes:
    """Return the first input of an agent bootstrap: its own source, and its settings before it can import hvdlite.

    Args:
        silence: of the launcher, in seconds, after which the agent ends its ranks.
    """
    given = json.dumps({"python": list(sys.version_info[:2]), "version": __version__, "directory": directory,
                        "silence": silence, "environment": forwarded(environ)}).encode()
    source = Path(__file__).with_name("bootstrap.py").read_text(encoding="utf-8")  # not imported: importing runs it
    return repr(source).encode() + b"\n" + b"%08x" % len(given) + given


class Pinger:
    """Pings agents in a thread of its own, because the launcher may block in a write to its terminal.

    Attributes:
        remotes: the agents; the list is replaced, and never changed.
    """

    def __init__(self) -> None:
        self.remotes: Sequence[RemoteAgent] = ()
        self._stopped = threading.Event()
        with explained("the thread that pings other hosts"):
            threading.Thread(target=self._run, name="hvdrun-ping", daemon=True).start()

    def stop(self) -> None:
        """Stop pinging."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(PING_SECONDS):
            for remote in self.remotes:
                remote.ping()
