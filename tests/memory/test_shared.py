"""The host's shared file: windows that ranks agree on, pages that come and go, memory that runs out."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Callable

import numpy as np
import pytest

from hvdlite.core.kernel_files import anonymous_file
from hvdlite.memory.shared import SharedMemory

ALL = (0, 1, 2)


def ranks(count: int) -> tuple[int, list[SharedMemory]]:
    file = anonymous_file()
    return file, [SharedMemory(os.dup(file), rank) for rank in range(count)]


def allocated(file: int) -> int:
    return os.fstat(file).st_blocks * 512


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, 5 << 20])
def test_all_ranks_see_each_others_windows(nbytes: int) -> None:
    _, memories = ranks(3)
    for turn in range(3):
        windows = [memory.window(nbytes, ALL) for memory in memories]
        for rank, window in enumerate(windows):
            assert [part.size for part in window] == [nbytes] * 3 and not window[rank].any()
            assert window[rank].ctypes.data % 64 == 0
            window[rank][...] = 10 * turn + rank
        for window in windows:
            assert all((part == 10 * turn + rank).all() for rank, part in enumerate(window))


def test_a_view_outlives_the_memory() -> None:
    _, (memory,) = ranks(1)
    (part,) = memory.window(1 << 16, (0,))
    part[...] = 7
    view = part[100:200].view(np.int32)
    memory.close()
    del part
    gc.collect()
    assert (view == 0x07070707).all()
    view[...] = 1


@pytest.mark.skipif(sys.platform != "linux", reason="pages are returned on Linux only")
def test_the_pages_of_a_window_go_back_with_its_last_view() -> None:
    file, memories = ranks(2)
    before = allocated(file)
    windows = [memory.window(8 << 20, (0, 1)) for memory in memories]
    assert allocated(file) >= before + (16 << 20)
    kept = windows[1][1][:10]
    kept[...] = 5
    del windows
    gc.collect()
    assert before + (8 << 20) <= allocated(file) < before + (9 << 20)
    assert (kept == 5).all()
    del kept
    gc.collect()
    assert allocated(file) == before


def in_child(step: Callable[[], object]) -> None:
    """Do something in a forked child, as a worker of a data loader would."""
    pid = os.fork()
    if pid == 0:
        try:
            step()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_forked_child_gives_no_pages_back() -> None:
    """They are its parent's, who still reads them."""
    _, memories = ranks(2)
    windows = [memory.window(1 << 16, (0, 1)) for memory in memories]
    segments = [memory.segment((0, 1), 1 << 16) for memory in memories]
    for rank, segment in enumerate(segments):
        assert segment is not None
        segment.reserve(0, 100)
        segment.staging(rank, 0)[:100] = windows[rank][rank][...] = 7

    def let_go() -> None:
        windows.clear()
        gc.collect()
        for segment in segments:
            assert segment is not None
            segment.release()
            segment.close()

    in_child(let_go)
    assert all((window == 7).all() for window in windows[0])
    assert all((segment.staging(rank, 0)[:100] == 7).all() for segment in segments if segment for rank in (0, 1))


def test_a_file_without_a_range_left_is_no_memory_on_all_ranks_alike() -> None:
    file = os.memfd_create("short")
    os.ftruncate(file, 7 << 20)  # as long as a limit allows
    memories = [SharedMemory(os.dup(file), rank) for rank in range(3)]
    for wanted, fits in ((1 << 21, True), (1 << 21, False), (1 << 20, True), (1 << 20, False), (1 << 16, True)):
        for memory in memories:
            if fits:
                assert len(memory.window(wanted, (0, 1))) == (2 if memory is not memories[2] else 0)
            else:
                with pytest.raises(MemoryError, match=f"no range of {2 * wanted} bytes is left in the {7 << 20} bytes"):
                    memory.window(wanted, (0, 1))


@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 1 << 62, reason="elsewhere files are shorter")
def test_the_file_has_more_ranges_than_any_job_will_use() -> None:
    file, (memory,) = ranks(1)
    assert os.fstat(file).st_size == 1 << 62
    memory.window((1 << 62) - (4 << 20), (1,))  # another rank's
    before = allocated(file)
    (part,) = memory.window(2 << 20, (0,))
    part[...] = 3
    assert allocated(file) == before + (2 << 20) and (part == 3).all()


# docs/protocol.md#allocation
def test_no_memory_says_how_much_was_asked_for_and_ranks_stay_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, memories = ranks(3)
    first = memories[0].window(1 << 16, ALL)

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(MemoryError, match="65536 bytes"):
            memories[1].window(1 << 16, ALL)
    memories[2].window(1 << 16, ALL)
    again = [memory.window(1 << 16, ALL) for memory in memories]
    again[0][0][...] = 3
    assert (again[1][0] == 3).all() and not first[0].any()


def test_no_process_can_shrink_the_file() -> None:
    """The other ranks would end with SIGBUS."""
    file = anonymous_file()
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    os.close(file)
