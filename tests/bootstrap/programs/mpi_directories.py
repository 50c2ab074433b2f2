"""Ranks of one host with different directories for temporary files: all of them hear of it."""

from __future__ import annotations

import tempfile

from mpi4py import MPI

import hvdlite as hvd
from hvdlite.core.errors import LaunchError


def main() -> None:
    """Let the last rank differ."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    with tempfile.TemporaryDirectory() as another:
        if rank == size - 1:
            tempfile.tempdir = another
        try:
            hvd.init(comm=MPI.COMM_WORLD)
        except LaunchError as error:
            assert "must have the same TMPDIR" in str(error) and (another in str(error)) == (rank == size - 1), error
            return
    raise AssertionError("they have met")


if __name__ == "__main__":
    main()
