"""Programs of test_mailboxes.py."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from types import FrameType
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import api
from hvdlite.core.array import BFLOAT16
from hvdlite.core.errors import DuplicateNameError, MismatchError, PeerLeftError
from hvdlite.handoff import handle as handles
from hvdlite.handoff import mailbox
from hvdlite.handoff.exchange import MailboxCall

LEARNED = "done in a mailbox"
SHORT, LONG = MailboxCall.patience_seconds, 60.0
"""The patience of threads: as it is, and so long that calls stay in a mailbox on a busy machine, too."""


def _be_patient(seconds: float) -> None:
    hvd.barrier()
    MailboxCall.patience_seconds = seconds
    hvd.barrier()


def _repeat(name: str, elements: int = 1, times: int = 6) -> None:
    """Make a call again and again; all results must be right."""
    for index in range(times):
        result = hvd.allreduce(np.full(elements, index + hvd.rank(), np.float32), op=hvd.Sum, name=name)
        assert (result == sum(index + rank for rank in range(hvd.size()))).all(), (name, index, result)


def results_are_those_of_requests() -> None:
    hvd.init()
    _be_patient(LONG)
    for op in (hvd.Sum, hvd.Adasum, hvd.Sum, hvd.Adasum):  # one stem: they have no names
        for _ in range(6):
            result = hvd.allreduce(np.full(10, hvd.rank() + 1.0), op=op)
            assert (result == (3.0 if op is hvd.Sum else 1.5)).all(), (op, result)
    ranks = np.random.default_rng(hvd.rank())
    for kind in (np.float32, np.float16, BFLOAT16, np.int8, np.uint64):
        for elements in (1, 1000, 16 << 10, 60_001, 1 << 20):
            values = (ranks.standard_normal(elements) * 50).astype(kind)
            for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Product) if elements < 60_000 else (hvd.Average,):
                name = f"{np.dtype(kind)}-{elements} {op.name}"
                handle = hvd.allreduce_async(values, op=op, prescale_factor=0.5, postscale_factor=3.0, name=name)
                want = handle.wait().tobytes()
                for _ in range(4):
                    result = hvd.allreduce(values, op=op, prescale_factor=0.5, postscale_factor=3.0, name=name)
                    assert result.tobytes() == want, name
                if elements * values.itemsize <= 4 << 20:
                    assert LEARNED in hvd.story(name), name
    hvd.shutdown()


def all_kinds_give_what_requests_give() -> None:
    """Each kind's blocking call, in mailboxes of a stem that all share, against its asynchronous one."""
    hvd.init()
    _be_patient(LONG)
    rank, size, everything = hvd.rank(), hvd.size(), np.random.default_rng(7)
    for turn in range(60):
        rows, columns = int(everything.integers(0, 5)), int(everything.choice([0, 1, 3, 5000]))
        kind = [np.float32, np.float16, np.int64][turn % 3]
        uneven = int(everything.integers(0, 4)) * (rank + 1)
        own = np.random.default_rng(100 * turn + rank)
        even, ragged, parts = ((own.standard_normal((count, columns)) * 50).astype(kind)
                               for count in (rows, uneven, size * (rank + 1)))
        splits = [1 + other for other in range(size)] if turn % 2 else None
        splits = splits and [min(each, len(parts) // size) for each in splits]
        root, again = int(everything.integers(size)), turn - turn % 6
        for name, blocking, other in (
                ("gathered", lambda name, x=ragged: hvd.allgather(x, name=name),
                 lambda name, x=ragged: hvd.allgather_async(x, name=name).wait()),
                ("sent", lambda name, x=even, r=root: hvd.broadcast(x, r, name=name),
                 lambda name, x=even, r=root: hvd.broadcast_async(x, r, name=name).wait()),
                ("scattered", lambda name, x=even: hvd.reducescatter(x, name=name),
                 lambda name, x=even: hvd.reducescatter_async(x, name=name).wait()),
                ("swapped", lambda name, x=parts, s=splits: hvd.alltoall(x, s, name=name),
                 lambda name, x=parts, s=splits: hvd.alltoall_async(x, s, name=name).wait()[:None if s else 1])):
            want = other(f"{name} other {turn}")
            for index in range(4):
                found = blocking(f"{name}.{again}.{index}")
                pairs = zip(found, want, strict=True) if isinstance(found, tuple) else [(found, np.asarray(want).reshape(
                    found.shape) if name == "swapped" else want)]
                for one, two in pairs:
                    assert one.dtype == two.dtype and one.shape == two.shape, (name, turn, one.shape, two.shape)
                    assert np.array_equal(one, two), (name, turn)
        hvd.barrier()
    learned = sum(LEARNED in hvd.story(f"{name}.{again}.{index}") for name in ("gathered", "sent", "scattered", "swapped")
                  for again in range(0, 60, 6) for index in range(4))
    assert learned > 80, learned
    hvd.shutdown()


KINDS = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier")


def random_calls_in_several_sets(seed: int) -> int:
    """Blocking calls of all kinds and sizes, in sets that overlap; now and then a rank is late, or does not block.

    Returns how many calls went through mailboxes.
    """
    hvd.init()
    rank, choice, learned = hvd.rank(), random.Random(seed), 0
    sets = [hvd.global_process_set, *map(hvd.add_process_set, ([0, 1], [1, 2], [2, 0]))]
    for turn in range(250):
        chosen, kind, stem = choice.choice(sets), choice.choice(KINDS), choice.choice("abc")
        ranks = list(chosen.ranks)
        odd, root = choice.choice(ranks), choice.choice(ranks)  # the odd one is late, or does not block
        is_late, differs, columns = choice.random() < 0.02, choice.random() < 0.1, choice.choice([1, 1, 50, 20_000])
        rows = {each: choice.randrange(4) if kind == "allgather" else len(ranks) for each in ranks}
        for index in range(choice.randrange(1, 6)):
            if rank not in ranks:
                continue
            values = {each: np.full((rows[each], columns), 1000 * turn + 10 * index + each, np.int64) for each in ranks}
            if rank == odd and is_late and not index:
                time.sleep(2 * SHORT)
            name = f"{stem} {kind} {turn}.{index}" if stem == "a" else f"{stem} {kind}"
            found = _called(kind, values[rank], name, chosen, root, blocks=rank != odd or not differs)
            if kind != "barrier":  # which has no name
                want = _wanted(kind, values, rank, root)
                assert np.array_equal(found, want), (seed, turn, index, kind, ranks, found, want)
                learned += LEARNED in hvd.story(name)
    hvd.barrier()
    hvd.shutdown()
    return learned


def _called(kind: str, own: Any, name: str, ranks: Any, root: int, *, blocks: bool) -> Any:
    """Make a call; return its result, which of an alltoall without splits is the values only."""
    if kind == "barrier":
        return hvd.barrier(process_set=ranks)
    further: dict[str, Any] = {"op": hvd.Sum} if kind in ("allreduce", "reducescatter") else {}
    if kind == "broadcast":
        further["root_rank"] = root
    if blocks:
        return getattr(hvd, kind)(own, name=name, process_set=ranks, **further)
    result = getattr(hvd, f"{kind}_async")(own, name=name, process_set=ranks, **further).wait()
    return result[0] if isinstance(result, tuple) else result


def _wanted(kind: str, values: dict[int, Any], rank: int, root: int) -> Any:
    """Return the result of a call on a rank, whose ranks bring these values."""
    place = list(values).index(rank)
    if kind == "allgather":
        return np.concatenate(list(values.values()))
    if kind == "alltoall":
        return np.concatenate([each[place:place + 1] for each in values.values()])
    if kind == "broadcast":
        return values[root]
    total = np.sum(list(values.values()), axis=0)
    return total if kind == "allreduce" else total[place:place + 1]


def whatever_ends_a_mailbox_the_calls_go_on() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    _be_patient(LONG)
    staging = api.runtime().staging_bytes()
    _repeat("x")
    assert LEARNED in hvd.story("x")
    assert 62 << 10 <= api.runtime().staging_bytes() - staging < 72 << 10, "two rounds of an area of the smallest size"
    _process_sets()
    _be_patient(SHORT)
    if rank == 0:
        time.sleep(3 * SHORT)  # the others' calls become requests meanwhile
    _repeat("x")
    try:
        hvd.allreduce(np.zeros(1 + rank), name="x")
        raise AssertionError
    except MismatchError as error:
        assert "ranks disagree about the shape of 'x'" in str(error)
    _repeat("x")
    if rank:
        result = hvd.allreduce(np.array([rank]), op=hvd.Sum, name="x")
    else:
        result = hvd.allreduce_async(np.array([rank]), op=hvd.Sum, name="x").wait()
    assert result[0] == sum(range(size))
    _repeat("x", elements=2)
    _repeat("x", elements=12_000)  # more than there is room for
    for index in range(20):  # without a name, of several sizes
        assert hvd.allreduce(np.full(1 + index % 2, index))[0] == index
    _timeline()
    if rank == size - 1:
        hvd.join()
    else:
        for index in range(6):
            assert hvd.allreduce(np.array([index]), op=hvd.Sum, name="x")[0] == index * (size - 1)
        hvd.join()
    _repeat("x")
    if rank == 1:
        hvd.shutdown()
        return
    try:
        hvd.allreduce(np.zeros(1, np.float32), name="x")
        raise AssertionError
    except PeerLeftError:
        pass
    hvd.shutdown()


def _process_sets() -> None:
    pair = hvd.add_process_set([0, 1])
    for index in range(6):
        if hvd.rank() in pair.ranks:
            result = hvd.allreduce(np.array([index + hvd.rank()]), op=hvd.Sum, name="y", process_set=pair)
            assert result[0] == 2 * index + 1
    if hvd.rank() in pair.ranks:
        assert LEARNED in hvd.story("y")
    hvd.barrier()  # the others remove it only now
    hvd.remove_process_set(pair)


def _timeline() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "timeline.json")
        hvd.start_timeline(path)
        hvd.barrier()  # from here on, all ranks trace
        _repeat("traced")
        hvd.barrier()
        hvd.stop_timeline()
        if hvd.rank() == 0:
            with open(path, encoding="utf-8") as file:
                events = [event for event in json.load(file) if event.get("name") == "NEGOTIATE_ALLREDUCE"]
            assert len(events) >= 6 * hvd.size(), "all calls of all ranks are in the timeline"
    _repeat("traced")


def until_one_dies() -> None:
    hvd.init()
    index = 0
    while True:
        hvd.allreduce(np.zeros(1), name="x")
        hvd.allgather(np.zeros(1 << 17), name="large")
        index += 1
        if index == 50:
            print("running", flush=True)


def an_interrupted_call_counts(rounds: int) -> int:
    """Ctrl-C interrupts rank 0's waits in a mailbox; every call counts as made, and all values are right."""
    hvd.init()
    _be_patient(LONG)
    runtime = api.runtime()
    if hvd.rank():
        for index in range(rounds):
            runtime.barrier(f"waits.{index}").wait()
            for value in range(6):
                assert _sum_of(index + value) == 2 * (index + value)
        hvd.shutdown()
        return 0
    main, interrupted = threading.get_ident(), 0
    looks = [False]  # whether the main thread has not been found waiting in this round

    def handle(signum: int, frame: FrameType | None) -> None:
        while frame is not None and looks[0]:
            file = frame.f_code.co_filename
            if frame.f_code.co_name in ("_wait", "wait") and file in (mailbox.__file__, handles.__file__):
                looks[0] = False
                if file == mailbox.__file__:
                    raise KeyboardInterrupt
            frame = frame.f_back

    def interrupt() -> None:
        for index in range(rounds):
            while not looks[0]:
                time.sleep(1e-4)
            while looks[0]:
                signal.pthread_kill(main, signal.SIGINT)
                time.sleep(1e-3)
            runtime.barrier(f"waits.{index}")

    signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    for index in range(rounds):
        looks[0] = True
        try:
            assert _sum_of(index) == 2 * index
        except KeyboardInterrupt:
            interrupted += 1
        for value in range(1, 6):
            assert _sum_of(index + value) == 2 * (index + value)
    thread.join()
    hvd.shutdown()
    return interrupted


def _sum_of(value: int) -> int:
    """Return the sum of a value, under a name that an interrupted call may still use."""
    while True:
        try:
            return int(hvd.allreduce(np.array([value]), op=hvd.Sum, name="x")[0])
        except DuplicateNameError:
            time.sleep(1e-4)
