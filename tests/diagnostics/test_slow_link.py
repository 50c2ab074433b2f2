"""Whose link is slow, from ledgers of several ranks; and what the kernel tells of a real connection."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.core.ledger import MOST_CONNECTIONS, Ledger, Traffic
from hvdlite.diagnostics.progress import Progress, read
from hvdlite.diagnostics.slowness import LEAST_BYTES, diagnose, flows, slow_link
from hvdlite.diagnostics.tcp_traffic import TcpTraffic

SENT = 1_000_000_000
SECONDS = 10.0
FAST = 1.0  # seconds of sending
SLOW = 6.0


def job(hosts: Mapping[int, str], sending: Mapping[tuple[int, int], float], blocked: float = 6.0,
        queued: float = 0.0) -> dict[int, Ledger]:
    """Return the ledgers of ranks on hosts, which have sent `SENT` bytes in so many seconds, by sender and receiver."""
    links: dict[int, list[Traffic]] = {rank: [] for rank in hosts}
    for sender, receiver in sorted({(min(pair), max(pair)) for pair in sending}):
        ends = f"{hosts[sender]}:{4000 + receiver}", f"{hosts[receiver]}:{5000 + sender}"
        there, back = sending.get((sender, receiver)), sending.get((receiver, sender))
        sent, received = SENT if there else 10, SENT if back else 10
        links[sender].append(Traffic(*ends, sent, received, there or 1.0))
        links[receiver].append(Traffic(*ends[::-1], received, sent, back or 1.0))
    return {rank: Ledger(seconds=SECONDS, steps=100, blocked=blocked, cpu=SECONDS - blocked - queued, queued=queued,
                         traffic=tuple(each)) for rank, each in links.items()}


def ring(slow: Mapping[tuple[int, int], float]) -> dict[int, Ledger]:
    return job({0: "a", 1: "b", 2: "c"}, {pair: slow.get(pair, FAST) for pair in ((0, 1), (1, 2), (2, 0))})


def test_the_rank_at_all_slow_connections_and_at_no_other_is_named() -> None:
    found = diagnose(ring({(0, 1): SLOW, (1, 2): 5.0}))
    assert found is not None and (found.rank, found.cause) == (1, "link") and found.share == pytest.approx(0.5)
    assert "the link of rank 1; 50% of each step" in str(found), str(found)
    assert "From rank 0 to rank 1 it is 166.7 MB/s while data is under way, between other ranks 1,000.0 MB/s" in str(found)
    assert found.as_dict()["slowest_connection"] == {"from": 0, "to": 1, "rate": 166666667}
    assert found.as_dict()["link"] == {"ranks": [1], "other_rate": 1000000000}


def test_one_slow_direction_is_its_senders() -> None:
    assert (found := slow_link(ring({(2, 0): SLOW}))) is not None and found.ranks == (2,)
    pair = job({0: "a", 1: "b"}, {(0, 1): FAST, (1, 0): SLOW})
    assert (found := slow_link(pair)) is not None and (found.ranks, found.flow.receiver) == ((1,), 0)


def test_connections_that_share_a_healthy_link_are_no_slow_link() -> None:
    """Rank 0 sends to two hosts at the same time: each connection has half of its rate."""
    fan = {(0, 1): 2 * FAST, (0, 2): 2 * FAST, (1, 0): FAST, (2, 0): FAST}
    assert slow_link(job({0: "a", 1: "b", 2: "c"}, fan)) is None


def test_nothing_is_said_of_less_time_than_the_kernel_can_measure() -> None:
    slow = ring({(0, 1): SLOW})
    for scale, names in ((0.02, True), (0.01, False)):
        part = {rank: msgspec.structs.replace(ledger, traffic=tuple(
            msgspec.structs.replace(each, sending=scale * each.sending) for each in ledger.traffic))
                for rank, ledger in slow.items()}
        assert (slow_link(part) is not None) == names


def test_a_rank_that_receives_slowly_from_all() -> None:
    everybody = {(sender, receiver): SLOW if receiver == 2 else FAST
                 for sender in range(3) for receiver in range(3) if sender != receiver}
    assert (found := slow_link(job({0: "a", 1: "b", 2: "c"}, everybody))) is not None and found.ranks == (2,)


def test_ranks_of_a_host_share_its_link() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
    rings = {pair: FAST for pair in ((0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1))}
    found = diagnose(job(hosts, {**rings, (0, 2): 5.0, (2, 4): 5.0, (1, 3): 5.0, (3, 5): SLOW}))
    assert found is not None and found.rank in (2, 3) and "the link of ranks 2, 3, on one host" in str(found)
    alone = slow_link(job(hosts, {**rings, (3, 5): SLOW, (1, 3): SLOW}))
    assert alone is not None and alone.ranks == (3,), "only this rank's connections are slow, and not the host's"


def test_links_that_are_slow_alike_or_hidden_are_nobodys() -> None:
    alike = ring({(0, 1): SLOW, (1, 2): SLOW, (2, 0): SLOW})
    found = diagnose(alike)
    assert found is not None and (found.rank, found.cause) == (-1, "communication") and "166.7 MB/s" in str(found)
    assert slow_link(job({0: "a", 1: "b"}, {(0, 1): SLOW})) is None, "nothing to compare it with"
    hidden = {rank: msgspec.structs.replace(each, blocked=0.5) for rank, each in ring({(0, 1): SLOW}).items()}
    assert slow_link(hidden) is not None and diagnose(hidden) is None, "nobody waits for it"
    assert slow_link(ring({(0, 1): 1.9 * FAST})) is None


def test_a_rank_that_is_later_than_the_link_is_slow_comes_first() -> None:
    ledgers = ring({(0, 1): 3.0, (1, 2): 3.0})
    ledgers[0] = msgspec.structs.replace(ledgers[0], blocked=1.0, cpu=9.0)
    assert (found := diagnose(ledgers)) is not None and (found.rank, found.cause) == (0, "computing")


def test_a_rank_without_a_core_has_no_slow_link() -> None:
    assert diagnose(job({0: "a", 1: "b"}, {(0, 1): FAST, (1, 0): 3.0}, blocked=3.0, queued=4.0)) is None


def test_messages_and_connections_with_others_say_nothing() -> None:
    ledgers = ring({})
    strange = Traffic("a:1", "s3:443", SENT, SENT, 9.0)
    control = Traffic("a:2", "b:2", int(0.9 * LEAST_BYTES * SENT), 0, 9.0)
    ledgers[0] = msgspec.structs.replace(ledgers[0], traffic=(*ledgers[0].traffic, strange, control))
    ledgers[1] = msgspec.structs.replace(ledgers[1], traffic=(*ledgers[1].traffic, Traffic("b:2", "a:2", 0, 5, 0.0)))
    assert [(flow.sender, flow.receiver, flow.rate) for flow in flows(ledgers)] == [(0, 1, SENT), (1, 2, SENT), (2, 0, SENT)]
    parallel = (Traffic("a:3", "b:3", SENT, 0, 2.0), Traffic("a:4", "b:4", SENT, 0, 4.0))
    ends = tuple(Traffic(each.remote, each.local, 0, SENT, 0.0) for each in parallel)
    both = {rank: Ledger(seconds=SECONDS, steps=9, traffic=links) for rank, links in enumerate((parallel, ends))}
    assert [(flow.share, flow.rate) for flow in flows(both)] == [(0.4, SENT / 2)], "two connections at the same time"


_ENDS = st.sampled_from(["a:1", "a:2", "b:1", "b:2", "c:1"])


_TRAFFIC = st.builds(Traffic, _ENDS, _ENDS, st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.floats(0, 100))


@given(st.dictionaries(st.integers(0, 5), st.builds(
    Ledger, seconds=st.floats(0.001, 100), steps=st.just(50), blocked=st.floats(0, 100), queued=st.floats(0, 100),
    traffic=st.lists(_TRAFFIC, max_size=4).map(tuple))))
def test_any_links_are_answered(ledgers: Mapping[int, Ledger]) -> None:
    found = diagnose(ledgers)
    assert found is None or (found.rank in {*ledgers, -1} and str(found) and found.as_dict())


def test_what_has_been_added() -> None:
    def of(sent: int, *, links: int = 1) -> Ledger:
        return Ledger(traffic=tuple(Traffic(f"a:{port}", "b:1", sent, sent, sent / 100) for port in range(links)))
    assert of(70).since(of(40)).traffic == (Traffic("a:0", "b:1", 30, 30, pytest.approx(0.3)),)
    assert of(10).since(of(40)).traffic == of(10).traffic, "another connection"
    assert of(10, links=2).since(of(4)).traffic[1].sent == 10, "a new one"
    full = of(4, links=MOST_CONNECTIONS)
    renamed = Ledger(traffic=(Traffic("z:1", "b:1", 10, 10, 0.1),))
    assert renamed.since(full).traffic == (), "it may be older than the earlier ledger, which had no room for it"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="needs Linux's tcp_info")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_counts_what_is_sent_to_another_address(family: int, tmp_path: Path) -> None:
    hosts = "127.0.0.1", "127.0.0.2"
    mapped = [f"::ffff:{host}" if family == socket.AF_INET6 else host for host in hosts]
    with socket.socket(family) as listener, socket.socket(family) as sender:
        listener.bind((mapped[1], 0))
        listener.listen()
        sender.bind((mapped[0], 0))
        sender.connect(listener.getsockname()[:2])
        receiver = listener.accept()[0]
        with receiver:
            local, remote = (f"{host}:{each.getsockname()[1]}" for host, each in zip(hosts, (sender, receiver), strict=True))
            progress = Progress()
            progress.publish(str(tmp_path), 0)
            progress.watch(traffic=True)
            try:
                progress.round()
                sender.sendall(bytes(100_000))
                assert len(receiver.recv(100_000, socket.MSG_WAITALL)) == 100_000
                found = {link.local: link for link in TcpTraffic().read()}
                deadline = time.monotonic() + 20
                while found[local].sent < 100_000 and time.monotonic() < deadline:  # acknowledged, maybe late
                    found = {link.local: link for link in TcpTraffic().read()}
                progress._traffic = TcpTraffic()  # which has not just read
                progress.round()
            finally:
                progress.withdraw()
    assert found[local].remote == remote and found[remote].remote == local
    assert found[local].sent in (100_000, 100_001) and found[remote].received == 100_000
    assert found[remote].sent <= 1 and all(0 <= each.sending < 60 for each in found.values())
    seen = {link.local: link for link in read(str(tmp_path), 0).ledger.traffic}
    assert seen[local].sent == 100_000, "since the first step"


def test_connections_within_a_host_do_not_count() -> None:
    with socket.socket() as listener, socket.socket() as sender:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        sender.connect(listener.getsockname())
        receiver = listener.accept()[0]
        with receiver:
            known = {link.local for link in TcpTraffic().read()}
            assert not known & {f"127.0.0.1:{each.getsockname()[1]}" for each in (sender, receiver)}
