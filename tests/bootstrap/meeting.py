"""Ranks that meet, as threads."""

from __future__ import annotations

import threading
from typing import Any

from hvdlite.bootstrap.admission import accept_ranks
from hvdlite.bootstrap.rendezvous import Address, connect_to_rank_0, listen
from hvdlite.control.wire import RankInfo
from hvdlite.core.errors import LaunchError
from tests.worlds import HANGS_SECONDS

LIMIT = 1 << 16

SETTINGS = (("HVDLITE_SHM_SLOT", "4096"), ("HVDLITE_CPU_OPERATIONS", "auto"))


def rank_info(rank: int, size: int = 3, version: str = "1", job: str = "job") -> RankInfo:
    return RankInfo(rank=rank, size=size, pid=1000 + rank, host="host", version=version, job=job, settings=SETTINGS)


def meet(address: Address, rank_infos: list[RankInfo], timeout: float = 30.0, stranger: Any = None) -> list[Any]:
    """Let rank 0 receive and the others join; return each one's welcome or error."""
    listener = listen(address)
    if not address.path:
        address = Address(host=address.host, port=listener.getsockname()[1], key=address.key)
    results: list[Any] = [None] * len(rank_infos)

    def run(index: int) -> None:
        try:
            if index == 0:
                connections, results[0] = accept_ranks(listener, address, rank_infos[0], timeout=timeout, frame_limit=LIMIT)
            else:
                connection, results[index] = connect_to_rank_0(address, rank_infos[index], timeout=timeout,
                                                               frame_limit=LIMIT)
                connections = {0: connection}
            for connection in connections.values():
                connection.close()
        except LaunchError as error:
            results[index] = error

    workers = [threading.Thread(target=run, args=(index,)) for index in range(len(rank_infos))]
    workers[0].start()
    if stranger is not None:
        stranger(address)
    for worker in workers[1:]:
        worker.start()
    for worker in workers:
        worker.join(HANGS_SECONDS)
        assert not worker.is_alive()
    listener.close()
    return results
