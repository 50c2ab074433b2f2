"""The scenarios of Horovod's own tests of elastic jobs, under `hvdrun --horovod-compat`; those that it skips included.

They are in its test/integration/elastic_common.py: hosts come and go, processes raise or are killed, and the ranks that are
left train each epoch. What is different on purpose is listed in decision 34.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runner.elastic_jobs import Job
from tests.tf.support import ENVIRONMENT
from tests.worlds import PYTHON_PATH, clean_environment

PROGRAMS = Path(__file__).parent / "programs"
HOST, OTHER = "localhost", "127.0.0.1"
EXCEPTION, KILL = "exception", "kill"
FRAMEWORKS = ("numpy", "torch", "tensorflow")
"""With NumPy alone a rank begins in a tenth of the time: what hvdrun does about hosts and failures is the same."""
pytestmark = pytest.mark.slow


def cases(*quick: tuple[object, ...], modes: Sequence[str] = (), slots: Sequence[int] = (1, 2)) -> pytest.MarkDecorator:
    """Let a test run with each framework, number of slots of a host, and mode of failure; in `make test` with some only."""
    every = [(framework, each, *mode) for framework in FRAMEWORKS for each in slots
             for mode in [(mode,) for mode in modes] or [()]]
    assert set(quick) <= set(every)
    return pytest.mark.parametrize(("framework", "slots", "mode") if modes else ("framework", "slots"), [
        pytest.param(*case, marks=[] if case in quick else pytest.mark.long) for case in every])


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        epochs: what rank 0 has recorded.
    """

    code: int
    text: str
    epochs: list[dict[str, Any]]

    def each(self, *names: str) -> list[tuple[Any, ...]]:
        """Return some values of each epoch."""
        return [tuple(epoch[name] for name in names) for epoch in self.epochs]


def run(framework: str, hosts: Sequence[Sequence[str]] | str, *flags: str, program: Sequence[object] = ()) -> Ended:
    """Run a job of `programs/scheduled_*.py`.

    Args:
        hosts: those that discovery finds in each epoch, the last ones from then on; or fixed ones.
        program: its arguments.
    """
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"needs {framework}")
    with tempfile.TemporaryDirectory() as name:  # a short one, for sockets
        folder = Path(name)
        record, script = folder / "record", PROGRAMS / f"scheduled_{framework}.py"
        found = ["-H", hosts] if isinstance(hosts, str) else ["--host-discovery-script", discovery(folder, record, hosts)]
        environment = {**clean_environment(), **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH}
        with Job(folder, "--horovod-compat", *found, *flags, environment=environment,
                 program=[sys.executable, str(script), "--record", str(record), *map(str, program)]) as job:
            code = job.end()
        epochs = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        ended = Ended(code, job.text, epochs)
    assert ended.each("epoch", "rank", "commits") == [(epoch, 0, 11 * epoch + 10) for epoch in range(len(epochs))], ended
    return ended


def discovery(folder: Path, record: Path, hosts: Sequence[Sequence[str]]) -> str:
    """Return a discovery program that prints other hosts after each epoch that was recorded."""
    choices = [f"{epoch}) echo '{chr(10).join(each)}';;" for epoch, each in enumerate(hosts[:-1])]
    script = folder / "discovery"
    script.write_text("\n".join(["#!/bin/sh", f"case $(cat {record} 2>/dev/null | wc -l) in", *choices,
                                 f"*) echo '{chr(10).join(hosts[-1])}';;", "esac", ""]), encoding="utf-8")
    script.chmod(0o755)
    return str(script)


def both(slots: int) -> list[str]:
    return [f"{HOST}:{slots}", f"{OTHER}:{slots}"]


def sizes(slots: int) -> list[str]:
    """Return flags: a job begins with the slots of one host at least, and uses those of two."""
    return ["-np", str(slots), "--min-num-proc", str(slots), "--max-num-proc", str(2 * slots)]


def moving(slots: int) -> list[list[str]]:
    """Return the hosts of each epoch: one, then another one beside it, then that one alone."""
    return [[f"{HOST}:{slots}"], both(slots), [f"{OTHER}:{slots}"]]


@cases(("numpy", 1), ("torch", 1))
def test_hosts_added_and_removed(framework: str, slots: int) -> None:
    """And `test_reset_limit` where the limit is great enough."""
    ended = run(framework, moving(slots), *sizes(slots), "--reset-limit", "2", program=["--change-after", 0, 1])
    assert ended.code == 0, ended.text
    assert ended.each("size", "hostname", "start_rank", "worlds") == [
        (slots, HOST, 0, 1), (2 * slots, HOST, 0, 2), (slots, OTHER, slots, 3)], ended.text


@cases(("numpy", 1))
def test_reset_limit(framework: str, slots: int) -> None:
    ended = run(framework, moving(slots), *sizes(slots), "--reset-limit", "1", program=["--change-after", 0, 1])
    assert ended.code == 1 and "the limit of 1 resets has been reached, and the hosts have changed" in ended.text, ended.text
    assert ended.each("size") == [(slots,), (2 * slots,)], ended.text


def check_single_failure(ended: Ended, slots: int) -> None:
    assert ended.code == 0 and "no more processes are started on localhost" in ended.text, ended.text
    assert ended.each("size", "hostname", "start_rank", "worlds") == [
        (2 * slots, HOST, 0, 1), (slots, OTHER, slots, 2), (slots, OTHER, slots, 2)], ended.text


def failing(mode: str, *ranks: int) -> list[object]:
    return ["--fail-in", 1, "--ranks", *ranks, *(["--kill"] if mode == KILL else [])]


@cases(("numpy", 1, KILL), ("tensorflow", 1, EXCEPTION), modes=(EXCEPTION, KILL))
def test_single_rank_failure(framework: str, slots: int, mode: str) -> None:
    check_single_failure(run(framework, [both(slots)], *sizes(slots), program=failing(mode, 0)), slots)


@cases(("numpy", 1, EXCEPTION), modes=(EXCEPTION, KILL))
def test_fault_tolerance_without_scaling(framework: str, slots: int, mode: str) -> None:
    flags = ["-np", str(slots), "--min-num-proc", str(slots)]
    check_single_failure(run(framework, ",".join(both(slots)), *flags, program=failing(mode, 0)), slots)


@cases(("numpy", 1))
def test_all_ranks_failure(framework: str, slots: int) -> None:
    ended = run(framework, [both(slots)], *sizes(slots), program=failing(EXCEPTION, *range(2 * slots)))
    assert ended.code == 1 and "RuntimeError: fails in epoch 1" in ended.text, ended.text
    assert ended.each("size") == [(2 * slots,)], ended.text


@cases(("numpy", 2), slots=[2])
def test_all_hosts_blacklisted(framework: str, slots: int) -> None:
    """Horovod skips it: one process of each host fails."""
    ended = run(framework, [both(slots)], *sizes(slots), program=failing(EXCEPTION, 0, slots))
    assert ended.code == 1 and "RuntimeError: fails in epoch 1" in ended.text, ended.text
    assert ended.each("size") == [(2 * slots,)], ended.text


@cases(("numpy", 1))
def test_min_hosts_timeout(framework: str, slots: int) -> None:
    """Horovod skips it: no other hosts come for those that are needed."""
    needed = ["-np", str(2 * slots), "--min-num-proc", str(2 * slots), "--max-num-proc", str(4 * slots)]
    ended = run(framework, [both(slots)], *needed, "--elastic-timeout", "1", program=failing(EXCEPTION, 0))
    assert ended.code == 75 and f"{2 * slots} ranks are needed; there were {slots} after 1 s" in ended.text, ended.text
    assert ended.each("size") == [(2 * slots,)], ended.text


@cases(("numpy", 1))
def test_resurrecting_blacklisted_hosts(framework: str, slots: int) -> None:
    """A host is used again after its cooldown, and fails again. tests/membership/test_hosts.py: the second one is longer."""
    last = 2 * slots - 1
    ended = run(framework, [both(slots)], *sizes(slots), "--blacklist-cooldown-range", "1", "3600", program=[
        "--epochs", 5, "--fail-in", 1, 3, "--ranks", last, "--change-after", 2])
    assert ended.code == 0 and ended.text.count(f"no more processes are started on {OTHER} for some time") == 2, ended.text
    assert ended.each("size", "start_rank", "worlds")[:4] == [
        (2 * slots, 0, 1), (slots, 0, 2), (slots, 0, 2), (slots, 0, 4)], ended.text
    assert len(ended.epochs) == 5
