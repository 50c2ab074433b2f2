"""The remote shells by which the launcher reaches other hosts: ssh, srun, or a program like ssh. Pure.

The command line on the other host contains no secrets: the program (`bootstrap.py`), the environment and the job's key
are sent over standard input.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Final

from hvdlite.core.own_programs import NOT_HERE

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
