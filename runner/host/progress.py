"""The progress of a host's processes: what the launcher receives of it each second, and at their end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hvdlite.core.errors import ProtocolError
from hvdlite.core.launch_contract import REPORT_SOCKET
from hvdlite.core.sockets import connect_unix
from hvdlite.diagnostics import progress
from hvdlite_runner.messages import Sample
from hvdlite_runner.placement import format_ranks

STALL_SECONDS: Final = 2.0
"""Seconds without a step after which rank 0 is asked which ranks wait for which."""
_ASK_SECONDS: Final = 0.5
_GPU_SECONDS: Final = 2.0


def sample(directory: str, pids: Mapping[int, int]) -> tuple[dict[int, Sample], str]:
    """Return the readings of a host's processes, and, on rank 0's host while one waits, which ranks wait for which.

    Args:
        directory: of the job.
        pids: the process ids, by rank.
    """
    loads = _gpu_loads(pids)
    ranks = {rank: Sample(progress.read(directory, rank), resident(pid), loads.get(pid, "")) for rank, pid in pids.items()}
    waits = ""
    socket_path = Path(directory) / REPORT_SOCKET  # on rank 0's host
    if any(STALL_SECONDS < each.reading.idle < math.inf for each in ranks.values()) and socket_path.exists():
        waits = _stall_summary(socket_path)
    return ranks, waits


def resident(pid: int) -> int:
    """Return the bytes of memory that a process uses; 0 on systems other than Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _stall_summary(path: Path) -> str:
    """Ask rank 0; return "" when it does not answer immediately."""
    with contextlib.suppress(OSError, ValueError, KeyError, ProtocolError):
        return "\n".join(stall_lines(ask(path, _ASK_SECONDS)["report"]))
    return ""


def stall_lines(report: Mapping[str, Any]) -> list[str]:
    """Return a line with the longest wait of a stall report and its reason."""
    if not report["stalls"]:
        return []
    stall = max(report["stalls"], key=lambda each: float(each["waited_seconds"]))
    return [f"ranks {format_ranks(stall['submitted'])} wait for {format_ranks(stall['missing'])}: '{stall['name']}', "
            f"{stall['waited_seconds']:.0f} s", *(f"  {line}" for line in report["diagnosis"])]


def _gpu_loads(pids: Mapping[int, int]) -> dict[int, str]:
    """Return "load memory" of the GPU that each process uses, by process id; empty without nvidia-smi.

    In a container nvidia-smi may report other process ids; then the i-th rank is assumed to use the i-th GPU.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    cards = _nvidia_smi("gpu", "uuid,utilization.gpu,memory.used")
    load = {words[0]: words[1] for words in cards}
    apps = {int(pid): f"{load.get(uuid, '?')}% {memory} MiB" for pid, uuid, memory in _nvidia_smi(
        "compute-apps", "pid,gpu_uuid,used_memory") if pid.isdigit()}
    if any(pid in apps for pid in pids.values()):
        return apps
    ordered = [pids[rank] for rank in sorted(pids)]
    return {pid: f"{words[1]}% {words[2]} MiB" for pid, words in zip(ordered, cards, strict=False)}


def _nvidia_smi(subject: str, fields: str) -> list[list[str]]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(["nvidia-smi", f"--query-{subject}={fields}", "--format=csv,noheader,nounits"],
                               capture_output=True, text=True, check=False, timeout=_GPU_SECONDS)
        return [[word.strip() for word in line.split(",")] for line in asked.stdout.splitlines()]
    return []


def ask(path: Path, timeout: float) -> dict[str, Any]:
    """Return rank 0's answer at its socket: the "text" and the "report".

    Raises:
        ProtocolError: when another user listens there.
        OSError: when there is no answer in time.
        ValueError: when the answer is invalid.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout)
        connect_unix(connection, str(path))
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    answer: dict[str, Any] = json.loads(b"".join(parts))
    return answer
