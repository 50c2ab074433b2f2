"""The planes that the contract is tested on: ranks as threads.

Over MPI, the ranks are processes: `test_mpi.py` starts the files `test_contract_*.py` under mpiexec.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdlite.planes.base import Plane
from tests.planes import under_mpi
from tests.planes.makers import gloo, hierarchical, hierarchical_mpi, loopback, mpi, shm, shm_fenced
from tests.planes.nccl_double import nccl

MAKERS = [mpi, hierarchical_mpi] if under_mpi.ACTIVE else [loopback, shm, shm_fenced, gloo, hierarchical, nccl]


@pytest.fixture(params=MAKERS, ids=lambda plane: plane.__name__)
def make_planes(request: pytest.FixtureRequest) -> Callable[..., list[Plane]]:
    return request.param
