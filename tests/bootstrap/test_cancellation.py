"""A rendezvous that another thread gives up, wherever it blocks; nothing is left open."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hvdlite.bootstrap.admission import accept_ranks
from hvdlite.bootstrap.descriptors import recv_fds, send_fds
from hvdlite.bootstrap.rendezvous import Address, Cancellation, connect_to_rank_0, listen
from hvdlite.core.errors import LaunchError
from tests.bootstrap.meeting import LIMIT, rank_info
from tests.worlds import descriptors


def give_up(action: Callable[[Cancellation], object], when: Callable[[], object] = lambda: None) -> None:
    """Run an action in a thread, give it up when `when` has returned, and check that it ends with the reason.

    It may be given up before it blocks; most of the time it is not.
    """
    cancellation, errors = Cancellation(), []

    def body() -> None:
        try:
            action(cancellation)
        except LaunchError as error:
            errors.append(str(error))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    when()
    cancellation.cancel("rank 2 was lost")
    thread.join(30)
    assert not thread.is_alive() and "rank 2 was lost" in errors[0]


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "unix":
        return Address(path=str(tmp_path / "control.2.sock"))
    return Address(host="127.0.0.1", port=0, key=b"secret" * 6)


def test_a_rendezvous_ends_wherever_it_blocks(address: Address) -> None:
    gc.collect()  # what earlier tests have left
    before = descriptors("socket:")
    with listen(address) as listener:
        if not address.path:
            address = Address(host=address.host, port=listener.getsockname()[1], key=address.key)
        with_rank_0 = []
        give_up(lambda cancellation: connect_to_rank_0(address, rank_info(1), timeout=30, frame_limit=LIMIT,
                                                       cancellation=cancellation),
                lambda: with_rank_0.append(listener.accept()[0]))
        for connection in with_rank_0:
            connection.close()
        give_up(lambda cancellation: accept_ranks(listener, address, rank_info(0), timeout=30, frame_limit=LIMIT,
                                                  cancellation=cancellation))
    give_up(lambda cancellation: connect_to_rank_0(address, rank_info(1), timeout=30, frame_limit=LIMIT,
                                                   cancellation=cancellation))  # nobody listens yet
    assert descriptors("socket:") <= before


def test_passing_descriptors_ends_wherever_it_blocks(tmp_path: Path) -> None:
    path = str(tmp_path / "memory.2.sock")
    give_up(lambda cancellation: send_fds(path, [], [[]], 30.0, cancellation))
    give_up(lambda cancellation: recv_fds(lambda: path, 0, 30.0, cancellation))
    assert not Path(path).exists()


def test_the_end_of_the_other_rank_is_told(tmp_path: Path) -> None:
    """A receiver that gets less than the number of descriptors does not take it for zero."""
    path = str(tmp_path / "memory.2.sock")
    with listen(Address(path=path)) as listener:
        receiver = threading.Thread(target=lambda: listener.accept()[0].close(), daemon=True)
        receiver.start()
        with pytest.raises((LaunchError, ConnectionError), match=r"ended while|reset|Broken"):
            recv_fds(lambda: path, 0, 30.0)
        receiver.join(30)
