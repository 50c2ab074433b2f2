"""Why a job is slow, from the ledgers of its ranks."""

from __future__ import annotations

import gc
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.core.ledger import Ledger
from hvdlite.diagnostics.progress import LEDGER_SECONDS, Progress, Schedule, read
from hvdlite.diagnostics.slowness import CAUSES, LEAST_STEPS, diagnose
from hvdlite.training.slowness import write

EVEN = Ledger(seconds=10.0, steps=100, blocked=1.0, cpu=8.0, queued=0.5, input=0.5, input_cpu=0.5)


def changed(**changes: float) -> Ledger:
    return Ledger(**{**{name: getattr(EVEN, name) for name in EVEN.__struct_fields__}, **changes})


WAITING = changed(blocked=4.0, cpu=5.0)  # a rank that is done early


@pytest.mark.parametrize(("late", "cause"), [
    (changed(input=3.5, cpu=5.0), "input"),
    (changed(queued=3.5, cpu=5.0), "cpu"),
    (changed(collecting=3.0), "collection"),
    (changed(cpu=5.0), "waiting"),
    (changed(cpu=8.5), "computing"),
])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_rank_that_waits_least_is_the_slow_one(late: Ledger, cause: str, rank: int) -> None:
    ledgers: dict[int, Ledger] = dict.fromkeys(range(4), WAITING)
    ledgers[rank] = late
    found = diagnose(ledgers)
    assert found is not None and (found.rank, found.cause) == (rank, cause) and found.share == pytest.approx(0.3)
    assert f"rank {rank} is late; 30% of each step" in str(found) and CAUSES[cause] in str(found)
    assert found.as_dict()["rank"] == rank and found.as_dict()["cause"] == cause


def test_a_rank_that_computes_longer_shows_what_shares_would_give() -> None:
    """The others compute for 0.6 of a step and the late rank for 0.9: with shares all take 4 / (3 / 0.6 + 1 / 0.9)."""
    found = diagnose({**dict.fromkeys(range(3), WAITING), 3: changed(cpu=8.5)})
    assert found is not None and found.speedup == pytest.approx(1 / (0.1 + 4 / (3 / 0.6 + 1 / 0.9)))
    assert "Shares of batches by speed would give 1.3 x: shares=\"auto\" of MirroredStrategy or state.loop" in str(found)
    assert found.as_dict()["speedup_of_shares"] == round(found.speedup, 4)
    other = diagnose({**dict.fromkeys(range(3), WAITING), 3: changed(input=3.5, cpu=5.0)})
    assert other is not None and "Shares" not in str(other) and "speedup_of_shares" not in other.as_dict()


def test_who_runs_longer_waits_longer_for_a_core() -> None:
    crowded, late = changed(blocked=5.0, cpu=2.5, queued=2.5, input=0, input_cpu=0), changed(cpu=4.5, queued=4.5, input=0,
                                                                                             input_cpu=0)
    found = diagnose({0: crowded, 1: late})
    assert found is not None and found.cause == "computing"


def test_time_without_a_core_after_a_wait_is_not_the_others() -> None:
    crowded = changed(blocked=4.0, cpu=5.0, queued=4.0)  # 3 s of these 13 are counted twice
    found = diagnose({0: crowded, 1: WAITING})
    assert found is not None and (found.rank, found.cause, found.share) == (0, "cpu", pytest.approx(0.3))


def test_nothing_stands_out() -> None:
    assert diagnose({0: EVEN, 1: EVEN}) is None
    assert diagnose({0: EVEN, 1: changed(blocked=1.9)}) is None, "a tenth of the time may be chance"
    assert diagnose({0: changed(blocked=3.0, cpu=6.0), 1: changed(blocked=1.7, cpu=7.3)}) is None, "a core may be slower"
    assert diagnose({0: changed(blocked=3.0, cpu=6.0), 1: changed(blocked=1.7, cpu=7.3, collecting=1.3)}) is not None
    assert diagnose({0: EVEN}) is None and diagnose({}) is None
    few = changed(steps=4)
    assert diagnose({0: few, 1: WAITING}) is None


def test_when_all_ranks_wait() -> None:
    assert (found := diagnose({0: changed(blocked=6.0, cpu=3.0), 1: changed(blocked=6.5, cpu=3.0)})) is not None
    assert (found.rank, found.cause, found.share) == (-1, "communication", 0.6)
    assert (found := diagnose({0: changed(blocked=2.0, cpu=7.0, absent=300), 1: changed(blocked=2.5, cpu=7.0)})) is not None
    assert (found.rank, found.cause) == (0, "absent")
    both = changed(blocked=2.0, cpu=7.0, absent=300)
    assert diagnose({0: both, 1: both}) is None, "a parameter that no rank uses delays nothing"


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # machines are noisy
@given(st.dictionaries(st.integers(0, 7), st.builds(
    Ledger, seconds=st.floats(0, 100), steps=st.integers(0, 100), blocked=st.floats(0, 100), cpu=st.floats(0, 100),
    queued=st.floats(0, 100), collecting=st.floats(0, 100), input=st.floats(0, 100), input_cpu=st.floats(0, 100),
    absent=st.integers(0, 1000))))
def test_any_ledgers_are_answered(ledgers: Mapping[int, Ledger]) -> None:
    found = diagnose(ledgers)
    assert found is None or (found.cause in CAUSES and (found.rank in ledgers or found.rank == -1) and str(found))


def test_the_ledger_of_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, now = Progress(), [100.0]
    monkeypatch.setattr("hvdlite.diagnostics.progress.time.monotonic", lambda: now[0])
    progress.watch()
    progress.watch()
    try:
        for _ in range(50):
            begun = progress.block()
            now[0] += LEDGER_SECONDS / 4
            progress.unblock(begun)
            progress.loaded(0.25, 0.125)
            progress.absent(2)
            gc.collect(0)
            progress.round()
        ledger, whole = progress.ledger(8 * LEDGER_SECONDS), progress.ledger()
    finally:
        progress.withdraw()
    assert (ledger.seconds, ledger.steps, ledger.blocked) == (8 * LEDGER_SECONDS, 32, 8 * LEDGER_SECONDS)
    assert (ledger.input, ledger.input_cpu, ledger.absent) == (8.0, 4.0, 64)
    assert ledger.collecting > 0 and ledger.cpu > 0
    assert whole.steps == 46
    collecting = progress._collecting
    gc.collect()
    assert progress._collecting == collecting, "nobody looks any more"


def test_long_steps_are_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, now = Progress(), [100.0]
    monkeypatch.setattr("hvdlite.diagnostics.progress.time.monotonic", lambda: now[0])
    for _ in range(10):
        now[0] += 60
        progress.round()
    assert (progress.ledger().steps, progress.ledger().seconds) == (LEAST_STEPS, 60.0 * LEAST_STEPS)
    progress.step(1)
    now[0] += 60
    progress.step(1)
    assert progress.ledger().steps == 1, "other steps, which the script counts"


def test_a_short_job_ends_with_its_last_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    progress, now = Progress(), [100.0]
    monkeypatch.setattr("hvdlite.diagnostics.progress.time.monotonic", lambda: now[0])
    progress.publish(str(tmp_path), 0)
    for _ in range(9):
        now[0] += 0.0625
        progress.round()
    now[0] += 50
    progress.withdraw()
    found = read(str(tmp_path), 0)
    assert (found.ledger.steps, found.ledger.seconds) == (8, 0.5) and found.peak > 0


def test_threads_that_come_and_go(tmp_path: Path) -> None:
    def queued(**threads: int) -> float:
        shutil.rmtree(tmp_path)
        for name, nanoseconds in threads.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "schedstat").write_text(f"5 {nanoseconds}000000000 1\n")
        (tmp_path / "ending").mkdir(parents=True)
        with ThreadPoolExecutor() as pool:
            running, waited = pool.submit(schedule.read).result()
        assert 0 < running <= time.process_time()
        return waited

    schedule = Schedule(tmp_path)
    assert queued(a=3, b=4) == 7.0
    assert queued(a=5) == 9.0, "b has ended"
    assert queued(a=6, b=1) == 11.0, "another b"


def test_batches_that_another_thread_loads_do_not_count() -> None:
    progress = Progress()
    progress.round()
    thread = threading.Thread(target=progress.loaded, args=(5.0, 1.0))
    thread.start()
    thread.join()
    progress._ledgers.clear()
    progress.round()
    assert progress._ledgers[-1][1].input == 0


def test_numbers_are_written_as_each_library_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class TensorBoard:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

    class MLflow:
        def log_metrics(self, values: dict[str, float], step: int) -> None:
            told.append((values, step))

    class WandB:
        step = 7

        def log(self, values: dict[str, float], step: int | None = None, commit: bool = True) -> None:
            told.append((values, step) if step is None or step >= self.step else None)  # else W&B drops it

    for writer in (TensorBoard(), MLflow(), WandB()):
        write({"hvdlite/slow_rank": 1.0}, 7, writer)
    assert told == [("hvdlite/slow_rank", 1.0, 7), ({"hvdlite/slow_rank": 1.0}, 7), ({"hvdlite/slow_rank": 1.0}, 7)]
    for ahead in (WandB(), SimpleNamespace(run=WandB(), log=WandB().log)):
        told.clear()
        write({"hvdlite/slow_rank": 1.0}, 3, ahead)
        assert told == [({"hvdlite/slow_rank": 1.0, "hvdlite/step": 3}, None)]
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(summary=SimpleNamespace(
        scalar=lambda name, value: told.append((name, value)))))
    told.clear()
    write({"hvdlite/slow_rank": 1.0}, 7, SimpleNamespace(as_default=lambda step: nullcontext(told.append(step))))
    assert told == [7, ("hvdlite/slow_rank", 1.0)]
    with pytest.raises(TypeError, match="add_scalar"):
        write({}, 0, object())
    write({}, 0, None)


def test_a_progress_file_that_is_cut_off_says_nothing(tmp_path: Path) -> None:
    progress = Progress()
    progress.publish(str(tmp_path), 0)
    for _ in range(3):
        progress.step(1)
    (file,) = [each for each in tmp_path.iterdir() if each.name.endswith(".0")]
    whole = file.read_bytes()
    for length in range(0, len(whole), 97):
        (tmp_path / file.name.replace(".0", ".1")).write_bytes(whole[:length])
        read(str(tmp_path), 1)
    assert read(str(tmp_path), 0).steps == 3
