"""What a rank prints about the exception that ends it."""

from __future__ import annotations

import io
import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from hvdlite.api import set_id, shutdown
from hvdlite.bootstrap.admission import MissingRanks
from hvdlite.bootstrap.environments import read_launch_info
from hvdlite.bootstrap.rendezvous import Address, listen
from hvdlite.core.errors import (
    HvdliteError,
    LaunchError,
    MismatchError,
    PeerFailedError,
    PeerLeftError,
    PeerLostError,
    StallError,
)
from hvdlite.core.launch_contract import FailureRecord
from hvdlite.core.types import ReduceOp
from hvdlite.runtime.runtime import Runtime
from hvdlite.runtime.tracebacks import _ours, print_failure, text_of
from hvdlite.runtime.worlds import Worlds


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def _caught_from_hvdlite(call: object, *arguments: object) -> Exception:
    with pytest.raises(Exception) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value


@pytest.fixture
def job(tmp_path: Path) -> str:
    return str(tmp_path)


def test_the_frames_of_hvdlite_are_left_out_of_its_own_errors() -> None:
    error = _caught_from_hvdlite(set_id, "nonsense")
    assert "api.py" in text_of(error, full=True) and "api.py" not in text_of(error)
    assert "test_tracebacks.py" in text_of(error) and str(error) in text_of(error)


def test_an_error_that_hvdlite_did_not_mean_to_raise_keeps_all_frames() -> None:
    error = _caught_from_hvdlite(ReduceOp.from_bytes, "nonsense")
    assert text_of(error) == text_of(error, full=True)


def test_frames_are_left_out_of_causes_too() -> None:
    inner = _caught_from_hvdlite(set_id, "nonsense")
    try:
        raise RuntimeError("outer") from inner
    except RuntimeError as error:
        assert "api.py" not in text_of(error) and str(inner) in text_of(error) and "outer" in text_of(error)


def test_what_hvdlite_has_raised_and_caught_itself_is_left_out(tmp_path: Path) -> None:
    """The error's text contains it."""
    error = _caught_from_hvdlite(listen, Address(path=str(tmp_path / "nowhere" / "socket")))
    assert isinstance(error.__cause__, OSError)
    assert "FileNotFoundError" in text_of(error, full=True) and "FileNotFoundError" not in text_of(error)
    assert text_of(error).count("Traceback") == 1 and text_of(error).count("  File ") == 1, "the script's frame"
    try:
        raise LaunchError("outer") from _raised(OSError("of a function of the script"))
    except LaunchError as caught:
        assert "of a function of the script" in text_of(caught)


def test_a_meeting_that_fails_is_printed_by_the_first_rank_only(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = "ranks [2] did not connect"
    print_failure(_raised(MissingRanks(text, [2])), job, 0)
    print_failure(_raised(LaunchError(text)), job, 1)
    assert capfd.readouterr().err.count(text) == 1


def test_the_place_is_the_scripts_and_no_librarys(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    future: Future[None] = Future()
    future.set_exception(PeerFailedError("rank 1 failed", 1))
    with pytest.raises(PeerFailedError) as raised:
        future.result()
    print_failure(raised.value, job, 0)
    assert f"in test_the_place_is_the_scripts_and_no_librarys ({__file__}:" in capfd.readouterr().err


@pytest.mark.parametrize(("module", "is_printed"), [("torch.distributed.distributed_c10d", True), ("a_logger", False)])
def test_what_torchs_hook_prints_needs_no_launcher(job: str, module: str, is_printed: bool,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys, "excepthook", type("Hook", (), {"__module__": module, "__call__": print})())
    assert print_failure(_raised(ValueError("bad batch")), job, 1) is is_printed


def test_a_mismatch_is_printed_by_the_first_rank_only(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    values = "ranks disagree about 'x': rank 0: [3]; rank 1: [4]"
    error = _raised(MismatchError(f"{values}. Use the same.\nwhat happened on this rank"))
    print_failure(error, job, 1)
    first = capfd.readouterr().err
    print_failure(error, job, 0)
    second = capfd.readouterr().err
    assert "Traceback" in first and "what happened" in first
    assert second.startswith("rank 0 ended in _raised (")
    assert second.endswith(f", with the same MismatchError as another rank: {values}\n")
    print_failure(_raised(MismatchError("another")), job, 0)
    assert "Traceback" in capfd.readouterr().err


def test_a_rank_that_ends_because_of_another_prints_a_line(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    error = _raised(PeerFailedError("rank 1 failed with ValueError: boom\n\nrank 1's traceback:\n...", 1))
    print_failure(error, job, 0)
    assert capfd.readouterr().err.splitlines() == [
        f"rank 0 ended in _raised ({__file__}:{error.__traceback__.tb_lineno}): PeerFailedError: rank 1 failed with "
        "ValueError: boom"]
    print_failure(error, None, 0)
    assert "rank 1's traceback" in capfd.readouterr().err, "nobody else may tell of it without a launcher"
    print_failure(error, job, 0, full=True)
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize("error", [StallError("stalled\nthe report", 0), PeerLeftError("rank 0 left\nthe report", 0)])
def test_a_failure_that_nobody_else_tells_of_is_printed_once(error: HvdliteError, job: str,
                                                             capfd: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 2):
        print_failure(_raised(error), job, rank)
    assert capfd.readouterr().err.count("the report") == 1


def test_a_scripts_own_exception_is_printed_by_every_rank(job: str, capfd: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        print_failure(_raised(ValueError("boom")), job, rank)
    assert capfd.readouterr().err.count("Traceback") == 2


def test_without_a_standard_error_nothing_is_shown(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert not print_failure(_raised(ValueError("boom")), job, 0)


def test_the_scripts_own_exception_behind_an_internal_one_is_kept(tmp_path: Path) -> None:
    address = Address(path=str(tmp_path / "nowhere" / "socket"))

    def handled() -> None:
        try:
            raise KeyError("of the script")
        except KeyError:
            listen(address)

    text = text_of(_caught_from_hvdlite(handled))
    assert "KeyError: 'of the script'" in text and "FileNotFoundError" not in text
    assert text.count("Traceback") == 2 and "another exception occurred" in text and "direct cause" not in text


def test_the_scripts_own_exception_behind_a_hidden_one_is_kept() -> None:
    def handled() -> None:
        try:
            raise KeyError("of the script")
        except KeyError:
            read_launch_info({"HVDLITE_RANK": "x", "HVDLITE_SIZE": "2"}, 1)

    error = _caught_from_hvdlite(handled)
    assert isinstance(error.__context__, ValueError) and error.__suppress_context__
    assert "KeyError: 'of the script'" in text_of(error) and "ValueError" not in text_of(error)


def test_an_error_of_the_standard_library_inside_hvdlite_keeps_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLITE_JOB_DIRECTORY", raising=False)
    monkeypatch.setenv("HVDLITE_MEMBER", "1")
    error = _caught_from_hvdlite(Worlds(os.environ).join, None)
    assert isinstance(error, KeyError) and "worlds.py" in text_of(error) and text_of(error) == text_of(error, full=True)


def test_frames_of_the_standard_library_between_those_of_hvdlite_are_left_out() -> None:
    packages = ["runpy", "__main__", "hvdlite", "contextlib", "functools", "hvdlite_torch", "threading"]
    assert _ours(packages) == [False, False, True, True, True, True, False]
    assert _ours(["hvdlite", "contextlib", "__main__", "contextlib", "hvdlite"]) == [True, False, False, False, True]


@pytest.fixture
def environ(job: str) -> dict[str, str]:
    """Of rank 1, which cannot join: its size is no number."""
    return {"HVDLITE_RANK": "1", "HVDLITE_SIZE": "x", "HVDLITE_JOB_DIRECTORY": job}


def _fails_to_join(environ: dict[str, str]) -> LaunchError:
    worlds = Worlds(environ)
    with pytest.raises(LaunchError) as caught:
        worlds.join(None)
    assert worlds.fail(caught.value, prints=True)
    return caught.value


def test_a_child_of_a_rank_does_not_fail_for_the_rank(environ: dict[str, str], job: str,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    environ["HVDLITE_JOINED"] = "1"
    error = _fails_to_join(environ)
    assert "process 1, from which" in str(error) and "HVDLITE_SIZE='x'" in str(error)
    printed = capfd.readouterr().err
    assert str(error) in printed and printed.count("Traceback") == 1 and not list(Path(job).iterdir())
    del environ["HVDLITE_JOINED"]
    assert "has joined" not in str(_fails_to_join(environ)), "a wrapper's child: it is the rank"
    assert FailureRecord.read(job, 1) is not None


def test_a_process_says_that_it_is_the_rank_as_long_as_it_is_in_the_job() -> None:
    environ = {"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"}
    worlds = Worlds(environ)
    worlds.join(None)
    assert environ["HVDLITE_JOINED"] == str(os.getpid())
    worlds.leave()
    assert "HVDLITE_JOINED" not in environ


def test_a_member_id_that_is_no_number_does_not_hide_the_failure(environ: dict[str, str], job: str) -> None:
    environ["HVDLITE_MEMBER"] = "x"
    worlds = Worlds(environ)
    with pytest.raises(ValueError, match="'x'"):
        worlds.join(None)
    assert worlds.fail(_raised(ValueError("boom")))
    assert FailureRecord.read(job, 1) is not None


def _record(worlds: Worlds, error: BaseException, job: str) -> FailureRecord:
    assert worlds.fail(error, prints=True)
    record = FailureRecord.read(job, 0)
    assert record is not None
    return record


@pytest.fixture
def left(job: str) -> Worlds:
    """Of rank 0, which has left its job."""
    worlds = Worlds({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1", "HVDLITE_JOB_DIRECTORY": job})
    assert not worlds.fail(ValueError("boom"), prints=True) and not list(Path(job).iterdir()), "it has been in no job"
    worlds.join(None)
    worlds.leave()
    return worlds


def test_a_rank_that_has_left_the_job_because_of_an_exception_failed_when_it_left(left: Worlds, job: str) -> None:
    """Its `finally` may take longer than the others need to fail because of it."""
    before = time.time()
    for message in ("boom", "another"):
        error = ValueError(message)
        try:
            raise error
        except ValueError:
            shutdown()
            after = time.time()
            shutdown()
        record = _record(left, error, job)
        assert (record.kind, record.message, record.origin) == ("ValueError", message, 0)
        assert before <= record.when <= after
        before = after
    assert _record(left, ValueError("later"), job).when >= after


def test_what_a_rank_that_has_left_the_job_prints_is_shown(left: Worlds, job: str, capfd: pytest.CaptureFixture[str],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    with open(2, "w", closefd=False) as standard_error:
        monkeypatch.setattr("sys.stderr", standard_error)
        assert _record(left, _raised(ValueError("boom")), job).shown
    assert "ValueError: boom" in capfd.readouterr().err
    left.fail(ValueError("boom"))
    record = FailureRecord.read(job, 0)
    assert record is not None and not record.shown, "a hook of the script may print nothing"


def test_a_rank_that_has_left_the_job_because_another_was_lost_does_not_count_as_the_first(left: Worlds, job: str) -> None:
    lost = _raised(PeerLostError("rank 3 was lost", 3))
    assert _record(left, lost, job).origin == 3
    wrapped = RuntimeError("of a framework")
    wrapped.__cause__ = lost
    assert _record(left, wrapped, job).origin == 3
    left._members = (4, 5, 6, 7)
    assert _record(left, lost, job).origin == 7
    left._members = (0, 5)
    assert _record(left, lost, job).origin == 0, "it was a rank of an earlier, larger world"


def test_a_frameworks_error_follows_from_the_failure_of_the_job_that_was_left(left: Worlds, job: str,
                                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """`backward()` of DDP, for one, raises a `RuntimeError` with the text alone."""
    left.join(None)
    with monkeypatch.context() as patched:
        patched.setattr(Runtime, "failure", PeerLostError("rank 3 was lost", 3))
        left.leave()
    left.leave()
    assert _record(left, RuntimeError("rank 3 was lost"), job).origin == 3
    left._environ["HVDLITE_SIZE"] = "x"
    with pytest.raises(LaunchError) as refused:
        left.join(None)
    assert _record(left, refused.value, job).origin == 0, "that job is over"
