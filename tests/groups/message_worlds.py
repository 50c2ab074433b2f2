"""The ranks of a group that exchange messages, as threads of this process: hosts with real shared memory, and a network."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import pytest

from hvdlite.core.array import Array
from hvdlite.core.errors import HorovodInternalError
from hvdlite.core.kernel_files import anonymous_file
from hvdlite.core.world import Hosts
from hvdlite.diagnostics.progress import Progress
from hvdlite.groups import messages as messages_module
from hvdlite.groups.carriers import Carrier, RemoteCarrier, RingCarrier
from hvdlite.groups.link import Done, GroupLink
from hvdlite.groups.members import GroupMembers
from hvdlite.groups.messages import Messages
from hvdlite.handoff.group_state import GroupState
from hvdlite.memory.area import LEFT, Area, area_bytes
from hvdlite.memory.fence import Fence, fence_file
from hvdlite.memory.rings import Rings, pair_bytes
from hvdlite.memory.shared import SharedMemory
from tests.worlds import HANGS_SECONDS

RING = 1 << 16
LINGER_SECONDS = 0.002


class Network:
    """Carries announcements, in order between two ranks, and transfers, in any order; on a thread of its own."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._texts: dict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._halves: dict[str, tuple[Array, Done]] = {}
        self._pairs: list[tuple[tuple[Array, Done], tuple[Array, Done]]] = []
        self.listeners: dict[int, Callable[[int, bytes], None]] = {}
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def announce(self, source: int, to: Sequence[int], message: bytes) -> None:
        with self._changed:
            for each in to:
                self._texts[source, each].append(message)
            self._changed.notify_all()

    def add(self, name: str, values: Array, done: Done, *, sends: bool) -> None:
        with self._changed:
            if name in self._halves:
                pair = (self._halves.pop(name), (values, done))
                assert pair[0][0].size == values.size, name
                self._pairs.append(pair if not sends else (pair[1], pair[0]))
            else:
                self._halves[name] = values, done
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                deliverable = [way for way, texts in self._texts.items() if texts and way[1] in self.listeners]
                if not deliverable and not self._pairs:
                    if self._is_closed:
                        return
                    self._changed.wait()
                    continue
                if deliverable and (not self._pairs or self._rng.random() < 0.5):
                    source, to = self._rng.choice(deliverable)
                    act = self._heard(self.listeners[to], source, self._texts[source, to].popleft())
                else:
                    act = self._moved(*self._pairs.pop(self._rng.randrange(len(self._pairs))))
            act()

    @staticmethod
    def _heard(listener: Callable[[int, bytes], None], source: int, message: bytes) -> Callable[[], None]:
        return lambda: listener(source, message)

    @staticmethod
    def _moved(sent: tuple[Array, Done], received: tuple[Array, Done]) -> Callable[[], None]:
        def act() -> None:
            received[0][...] = sent[0]
            for _, tell in (sent, received):
                tell(None)
                tell(HorovodInternalError("told again"))  # as at the end of a runtime

        return act


class LocalLink(GroupLink):
    """A link through a network of tests."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank

    def announce(self, to: Sequence[int], text: bytes) -> None:
        self._network.announce(self._rank, to, text)

    def listen(self, hear: Callable[[int, bytes], None]) -> None:
        self._network.listeners[self._rank] = hear

    def send(self, name: str, values: Array, to: int, done: Done) -> None:
        self._network.add(name, values, done, sends=True)

    def receive(self, name: str, values: Array, source: int, done: Done) -> None:
        self._network.add(name, values, done, sends=False)

    def close(self) -> None:
        self._network.listeners[self._rank] = lambda source, text: None


def pending(end: Messages) -> list[str]:
    """Return descriptions of the calls under way, the oldest first."""
    return [call.shown() for call in list(end._calls)]


class Host:
    """The shared memory of some ranks.

    Args:
        ranks: indices in the group.
        fenced: as on machines that reorder stores.
    """

    def __init__(self, ranks: Sequence[int], *, fenced: bool) -> None:
        self.file, order, local = anonymous_file(), fence_file(), range(len(ranks))
        self.ranks = ranks
        self.memories = [SharedMemory(os.dup(self.file), index, Fence(os.dup(order)) if fenced else None) for index in local]
        os.close(order)
        self.heaps = [memory.heaps(len(ranks)) for memory in self.memories]

    def place(self, index: int) -> tuple[Area, Rings]:
        """Return what a rank of the host sees of the group."""
        memory, size = self.memories[index], len(self.ranks)
        lines, pairs = (memory.range(nbytes, range(size), nbytes) for nbytes in (area_bytes(size), pair_bytes(size)))
        assert lines is not None and pairs is not None
        return Area(lines.bytes, index, size), Rings(pairs.bytes.data, index, self.heaps[index], RING)

    @property
    def allocated(self) -> int:
        """Bytes of memory that are in use."""
        return os.fstat(self.file).st_blocks * 512

    def close(self) -> None:
        for memory in self.memories:
            memory.close()
        os.close(self.file)


class Rank:
    """What a group is to its messages: it has an area, and a worker that drives them when it is let."""

    def __init__(self, rank: int, host: Host, network: Network, size: int) -> None:
        index = host.ranks.index(rank)
        self.area, rings = host.place(index)
        near = {other: local for local, other in enumerate(host.ranks) if local != index}
        far = [other for other in range(size) if other not in host.ranks]
        carriers: dict[int, Carrier] = dict.fromkeys(near, RingCarrier(rings, self.area, near)) if near else {}
        if far:
            carriers.update(dict.fromkeys(far, RemoteCarrier(LocalLink(network, rank), far)))
        self.is_stopped = False  # as if the process were
        self._is_over = False
        self._asked = threading.Event()
        members = GroupMembers.of("group dp", range(size), rank, Hosts((tuple(range(size)),)))
        self.messages = Messages(members, GroupState("id", members.of_runtime, self.area), carriers, Progress())
        self.messages.let_work = self._asked.set
        self._asked.set()  # for what has come before
        self._worker = threading.Thread(target=self._work, name="hvdlite-worker", daemon=True)
        self._worker.start()

    def _work(self) -> None:
        while not self._is_over:
            self._asked.wait()
            time.sleep(LINGER_SECONDS)
            self._asked.clear()
            if not self.is_stopped:
                self.messages.drive(lambda: self._is_over)

    def collective(self, is_over: Callable[[], bool]) -> None:
        """Wait for other ranks, as in a collective."""
        while True:
            word = self.area.word
            seen = word.value
            if is_over():
                return
            if not self.messages.is_active or not self.messages.advance(blocked=True):
                word.wait(seen, min(0.05, max(0.0, self.messages.next_deadline - time.monotonic())))

    def close(self) -> None:
        """Leave the group."""
        if self._is_over:
            return
        self._is_over = True
        self.messages.leave()
        self.area.lines[self.area.index][LEFT] = 1
        self.area.wake()
        self._asked.set()
        self.messages.close()
        self.messages.close()
        if self._worker is not threading.current_thread():
            self._worker.join(HANGS_SECONDS)
        self.area.release()


class World:
    """All ranks of a group.

    Args:
        hosts: how many ranks each host has.
    """

    def __init__(self, hosts: Sequence[int], *, fenced: bool = False) -> None:
        size = sum(hosts)
        self.network = Network(len(hosts) + size)
        self.hosts = [Host(range(sum(hosts[:number]), sum(hosts[:number + 1])), fenced=fenced)
                      for number in range(len(hosts))]
        self.ranks = [Rank(rank, host, self.network, size) for host in self.hosts for rank in host.ranks]
        self.ends = [rank.messages for rank in self.ranks]

    def run(self, step: Callable[[int, Messages], None]) -> None:
        """Run a function on all ranks; raise the first error."""
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                step(rank, self.ends[rank])
            except BaseException as error:
                errors.append(error)
                for end in self.ends:
                    end.fail(RuntimeError(f"rank {rank} failed: {error!r}"))

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(len(self.ends))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANGS_SECONDS)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), list(map(pending, self.ends))

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.network.close()
        for host in self.hosts:
            host.close()


CARRIERS = pytest.mark.parametrize("one_host", [True, False], ids=["rings", "remote"])


@pytest.fixture
def ranks() -> Iterator[Callable[..., World]]:
    """Makes a world of so many ranks, on one host or on one each, or on the `hosts`."""
    made: list[World] = []

    def make(count: int = 0, one_host: bool = True, *, hosts: tuple[int, ...] = (), fenced: bool = False) -> World:
        made.append(World(hosts or ((count,) if one_host else (1,) * count), fenced=fenced))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "hvdlite-worker"]


@pytest.fixture(autouse=True)
def long_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is not woken sleeps on."""
    monkeypatch.setattr(messages_module, "SLEEP_SECONDS", 10 * HANGS_SECONDS)
