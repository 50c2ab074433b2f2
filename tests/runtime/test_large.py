"""Tensors over 2 GiB and over 2^31 elements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.programs import large as programs
from tests.worlds import processes

NEEDED = 12 << 30


def available() -> int:
    """Return the bytes that processes could still get, or 0 when the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


@pytest.mark.long
@pytest.mark.skipif(available() < NEEDED, reason=f"needs {NEEDED >> 30} GiB of memory")
def test_more_than_two_to_the_31_elements() -> None:
    processes(2, programs.more_than_two_to_the_31_elements, timeout=150)
