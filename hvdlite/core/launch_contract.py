"""The interface between a launcher and a rank: environment variables, exit codes and failure records.

The launcher sets these variables; `bootstrap/environments.py` reads them. A rank writes failure records. Nothing else is
exchanged, so either side can be replaced.

`StackDumpTarget` is the file to which a process writes its stacks on a signal; see `diagnostics.process_probe`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from hvdlite.core.world import World

RANK = "HVDLITE_RANK"
SIZE = "HVDLITE_SIZE"
LOCAL_RANK = "HVDLITE_LOCAL_RANK"
LOCAL_SIZE = "HVDLITE_LOCAL_SIZE"
CROSS_RANK = "HVDLITE_CROSS_RANK"
CROSS_SIZE = "HVDLITE_CROSS_SIZE"
JOB_DIRECTORY = "HVDLITE_JOB_DIRECTORY"
"""The rendezvous directory of this host's ranks, of mode 0700; the launcher creates and removes it."""
DIRECTORY_PREFIX = "hvdlite-job-"
"""The prefix of the names of job directories."""
SECRET = "HVDLITE_SECRET"
"""The job's key, hexadecimal; only needed if ranks connect over TCP."""
SECRET_FILE = "HVDLITE_SECRET_FILE"
"""A file with the job's key, instead of `SECRET`; only its owner may read it."""
SECRET_TAKEN = "HVDLITE_SECRET_TAKEN"
"""The id of the process that has removed the key from its environment; for the messages of its children, which have none."""
JOINED = "HVDLITE_JOINED"
"""The id of the process that has joined the job as this rank; set by itself, for its children, which inherit its rank."""
COORDINATOR = "HVDLITE_COORDINATOR"
"""host:port where rank 0 listens; not set if all ranks are on one host."""

MEMBER = "HVDLITE_MEMBER"
"""The member's id in an elastic job: never used again, whatever its rank becomes. Set in elastic jobs only."""
JOINER = "HVDLITE_JOINER"
"""1 for a member of an elastic job that is started later: its rank and size are provisional until it is admitted."""
EPOCH = "HVDLITE_EPOCH"
"""The number of the world to which a member's coordinates belong; members set it themselves, and founders begin with 1."""
COORDINATOR_PORT = "HVDLITE_COORDINATOR_PORT"
"""The port on which rank 0 of any world of an elastic job listens; not set: any free port."""
SLOT = "HVDLITE_SLOT"
"""The slot of its host that a member of an elastic job has for its whole life."""
HOSTNAME = "HOROVOD_HOSTNAME"
"""The name by which a member's host was given or discovered."""
ELASTIC = "HOROVOD_ELASTIC"
"""1 in elastic jobs, as in Horovod."""

MASTER_ADDR = "MASTER_ADDR"
"""`torch.distributed`'s (env://): the host where rank 0 has the store by which ranks meet. Not set in elastic jobs."""
MASTER_PORT = "MASTER_PORT"
"""`torch.distributed`'s: the store's port."""
TORCH_COORDINATES = {"RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local_rank", "LOCAL_WORLD_SIZE": "local_size"}
"""`torch.distributed`'s coordinates of a rank, by field of `World`."""
TORCH_VARIABLES = frozenset(TORCH_COORDINATES) | {MASTER_ADDR, MASTER_PORT}

MEMBER_SOCKET = "member.sock"
"""In the job directory of an elastic job: the socket at which the launcher, or its agent, serves this host's members."""
ENDING_FILE = "ending"
"""In the job directory, once the whole job ends: until then, SIGTERM tells a member of an elastic job to leave."""
REPORT_SOCKET = "report.sock"
"""In the job directory: the socket at which rank 0 serves stall reports."""
PROCESSES_FILE = "processes.json"
"""In the job directory: each rank's process id, and where it writes its stacks; see `diagnostics.process_probe`."""

PROGRESS_FILE = "progress"
"""In the job directory, with `.RANK` (elastic jobs: the member's id): how far the rank is; see `diagnostics.progress`."""
METRICS_FILE = "metrics"
"""In the job directory, with `.RANK`: the metrics that the script has recorded there; see `diagnostics.progress`."""
TASK_FILE = "task"
"""In the job directory: a function to call and its arguments, signed; see `hvdlite.run`."""
RESULT_FILE = "result"
"""In the job directory, with `.RANK`: the function's result or exception on that rank, signed."""
KEY_FILE = "key"
"""Beside a task, on the caller's side only: the job's key."""
CAUSE_FILE = "cause"
"""Beside a task, on the caller's side only: the rank that failed first, and the reason."""
MEMBERS_FILE = "members"
"""Beside a task of an elastic job, on the caller's side only: the members of the last world, by rank."""

OUTPUT_LOST = 74
"""hvdrun's exit code when the job has succeeded, and some of its output could not be written (EX_IOERR of sysexits.h)."""
RESULTS_LOST = 73
"""hvdrun's exit code when the job has succeeded, and results of a task could not be kept (EX_CANTCREAT)."""

COORDINATES = {
    RANK: "rank", SIZE: "size", LOCAL_RANK: "local_rank", LOCAL_SIZE: "local_size",
    CROSS_RANK: "cross_rank", CROSS_SIZE: "cross_size",
}
CONTRACT_VARIABLES = frozenset(COORDINATES) | {
    JOB_DIRECTORY, SECRET, SECRET_FILE, SECRET_TAKEN, JOINED, COORDINATOR, COORDINATOR_PORT, MEMBER, JOINER, EPOCH, SLOT}


def is_private_directory(status: os.stat_result) -> bool:
    """Return whether only this user can enter a directory, as must be so with a job's; a link is none (`os.lstat`)."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def write_private_file(path: Path, content: bytes) -> None:
    """Create a file that only this user can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def rank_environment(world: World, job_directory: str | None) -> dict[str, str]:
    """Return the variables that a launcher sets for one rank, under hvdlite's and Horovod's names."""
    ours = {name: str(getattr(world, field)) for name, field in COORDINATES.items()}
    theirs = {name.replace("HVDLITE_", "HOROVOD_"): value for name, value in ours.items()}
    directory = {} if job_directory is None else {JOB_DIRECTORY: job_directory}
    return {**ours, **theirs, **directory}


def torch_environment(world: World, address: str, port: int) -> dict[str, str]:
    """Return the variables by which `torch.distributed` (env://) finds the other ranks."""
    return {**{name: str(getattr(world, field)) for name, field in TORCH_COORDINATES.items()},
            MASTER_ADDR: address, MASTER_PORT: str(port)}


@dataclasses.dataclass(frozen=True)
class FailureRecord:
    """The record that a failing rank writes for its launcher, which then reports the first cause and not the first exit."""

    rank: int
    origin: int  # the rank where the failure began: `rank`, or the rank whose failure it was notified of
    when: float  # seconds since the epoch
    kind: str  # the exception's type
    message: str
    traceback: str
    shown: bool = False  # whether the process has printed the traceback to its standard error

    @staticmethod
    def path(job_directory: str, rank: int) -> Path:
        return Path(job_directory) / f"failure.{rank}.json"

    def write(self, job_directory: str) -> None:
        """Write the record atomically, if the directory is there and has room: it only adds to the exit code."""
        name = ""
        try:
            handle, name = tempfile.mkstemp(dir=job_directory, prefix=".failure.")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(dataclasses.asdict(self), file)
            os.replace(name, self.path(job_directory, self.rank))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)

    @classmethod
    def read(cls, job_directory: str, rank: int) -> FailureRecord | None:
        """Return a rank's record, or None if there is none (the rank was killed or did not fail)."""
        try:
            return msgspec.convert(json.loads(cls.path(job_directory, rank).read_text(encoding="utf-8")), cls)
        except (OSError, ValueError, msgspec.ValidationError):
            return None


class StackDumpTarget(NamedTuple):
    """The file to which a process writes its stacks, and the signal on which it does; by default there is none.

    Attributes:
        descriptor: a file descriptor of that process.
        signal: the signal's number; 0 for none.
    """

    descriptor: int = -1
    signal: int = 0


NO_STACK_DUMP: Final = StackDumpTarget()
