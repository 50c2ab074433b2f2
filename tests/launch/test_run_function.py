"""`hvdlite.run`: results, exceptions, deaths, and that nothing unsigned is unpickled."""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cloudpickle
import pytest

import hvdlite
from hvdlite.core.errors import LaunchError, PeerLostError, ProtocolError
from hvdlite.launch import run_function, run_task
from hvdlite.launch.run_function import sign, verified
from hvdlite_runner.host import worker_group
from hvdlite_runner.host.reaper import marked_processes
from hvdlite_runner.host.worker_group import WorkerGroup
from hvdlite_runner.job.task_files import TaskFiles, pieces_of
from hvdlite_runner.messages import PIECE_BYTES, Result, TaskPiece
from tests.launch.failing import check_first_exception
from tests.worlds import HANGS_SECONDS


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith(("HVDLITE_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TEST_JOB", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    monkeypatch.delenv("TEST_JOB")
    assert not marked_processes(f"TEST_JOB={tmp_path}".encode())


def test_a_function_for_which_the_disk_has_no_room_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((run_function, "write_private_file"), (worker_group, "append_private_file")):
        monkeypatch.setattr(module, name, full)
    with pytest.raises(LaunchError, match=r"/key on .*: No space left on device; make room there, or set TMPDIR"):
        hvdlite.run(print, np=1)
    with selectors.DefaultSelector() as selector, pytest.raises(LaunchError, match=r"to task on .*: No space left"):
        WorkerGroup(selector, print, {}).obey(TaskPiece(b"function"))


def test_a_result_for_which_the_disk_has_no_room_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent in place of the result, which may be larger."""
    key = bytes(16)

    def full(path: Path, content: bytes) -> None:
        if len(content) > 1 << 20:
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(run_function, "write_private_file", full)
    (tmp_path / "task").write_bytes(sign(run_function._pickled(bytes, (1 << 21,), {}), key, "task"))
    environ = {"HVDLITE_JOB_DIRECTORY": str(tmp_path), "HVDLITE_SECRET": key.hex(), "HVDLITE_RANK": "1"}
    text = r"bytes \(the result of rank 1\) to .*/part.1 on .*: No space left on device; make room there, or set TMPDIR"
    with pytest.raises(LaunchError, match=text):
        run_task.main(environ)
    failed, (error, told) = run_function._result(tmp_path, 1, key)
    assert failed and isinstance(error, LaunchError) and "OSError" not in told


def test_results_come_in_rank_order(capsys: pytest.CaptureFixture[str]) -> None:
    offset = 10

    def work(factor: int, *, name: str) -> tuple[int, float, str]:
        import numpy as np

        import hvdlite as hvd
        hvd.init()
        print("working")
        total = hvd.allreduce(np.array([float(hvd.rank() + 1)]), op=hvd.Sum)
        return factor * hvd.rank() + offset, float(total[0]), name

    assert hvdlite.run(work, (2,), {"name": "x"}, np=3) == [(10, 6.0, "x"), (12, 6.0, "x"), (14, 6.0, "x")]
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{rank}]<stdout>:working" for rank in range(3)]


def test_the_first_ranks_exception_is_raised_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    check_first_exception(lambda fail: hvdlite.run(fail, np=2))
    assert "rank 1 failed first: KeyError" in capsys.readouterr().err


def test_an_exception_that_cannot_be_pickled() -> None:
    def fail() -> None:
        error = ValueError("held")
        error.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RuntimeError, match="ValueError: held"):
        hvdlite.run(fail)


def test_a_killed_rank_is_named() -> None:
    def die() -> None:
        if os.environ["HVDLITE_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLostError, match="rank 1 failed first: killed by signal 9") as caught:
        hvdlite.run(die, np=2)
    assert caught.value.rank == 1


@pytest.mark.parametrize(("leave", "told"), [
    (lambda: os._exit(0), "rank 1 has ended without a result"),
    (lambda: sys.exit(0), "rank 1 has left the function with SystemExit instead of a result")])
def test_there_is_one_result_for_each_rank_or_an_exception(leave: Callable[[], object], told: str) -> None:
    with pytest.raises(PeerLostError, match=told) as caught:
        hvdlite.run(lambda: leave() if os.environ["HVDLITE_RANK"] == "1" else "result", np=2)
    assert caught.value.rank == 1


def test_arguments_and_results_that_are_larger_than_a_message_travel_in_pieces(tmp_path: Path) -> None:
    shell = tmp_path / "rsh"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    large = bytes(PIECE_BYTES + 1)
    assert hvdlite.run(lambda content: content + b"end", (large,), hosts="b:1",
                       options=["--remote-shell", str(shell)]) == [large + b"end"]


@pytest.mark.parametrize(("size", "pieces"), [(0, [0]), (4, [4]), (8, [4, 4]), (9, [4, 4, 1])])
def test_files_in_pieces(tmp_path: Path, size: int, pieces: list[int]) -> None:
    (tmp_path / "file").write_bytes(bytes(size))
    found = list(pieces_of(tmp_path / "file", 4))
    assert [len(content) for content, _ in found] == pieces
    assert [is_last for _, is_last in found] == [False] * (len(pieces) - 1) + [True]


def test_a_result_that_cannot_be_kept_or_is_not_complete_does_not_exist(tmp_path: Path) -> None:
    task = TaskFiles(str(tmp_path))
    task.write_result(Result(0, b"ab", False))
    assert not (tmp_path / "result.0").exists()
    task.write_result(Result(0, b"c", True))
    assert (tmp_path / "result.0").read_bytes() == b"abc" and task.problem == ""
    (tmp_path / "partial.1").symlink_to("/dev/full")
    task.write_result(Result(1, b"x", True))
    assert re.search("cannot keep the results .* on .*: .* set TMPDIR", task.problem)
    assert not (tmp_path / "result.1").exists()


def test_an_elastic_job_returns_the_results_of_the_ranks_with_which_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    def work(steps: int) -> tuple[int, int, int]:
        import numpy as np

        import hvdlite as hvd
        from hvdlite.training.elastic import run
        from hvdlite.training.elastic.state import ObjectState
        hvd.init()

        @run
        def train(state: ObjectState) -> int:
            while state.step < steps:
                state.step += int(hvd.allreduce(np.array(1), op=hvd.Sum)) // hvd.size()
                state.commit()
                if state.step == 3 and hvd.rank() == 0 and hvd.size() == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
            return int(state.step)

        return train(ObjectState(step=0)), hvd.rank(), hvd.size()

    assert hvdlite.run(work, (8,), np=3, min_np=2, max_np=3, options=["--blacklist-for-good"]) == [(8, 0, 2), (8, 1, 2)]
    told = capsys.readouterr().err
    assert "world 2, 2 ranks, goes on after commit" in told and "left: rank 0 on localhost (killed by signal 9" in told, told


def test_what_cannot_be_started_or_makes_no_sense() -> None:
    with pytest.raises(LaunchError, match="2 slots"):
        hvdlite.run(len, ("x",), np=3, hosts="localhost:2")
    for arguments in ({"hosts": "a", "hostfile": "b"}, {"use_gloo": True, "use_mpi": True}, {"slots": 2},
                      {"min_np": 1, "cooldown_range": (1,)}, {"min_np": 1, "cooldown_range": "12"},
                      {"hosts": "a", "host_discovery_script": "b"}):
        with pytest.raises(ValueError):
            hvdlite.run(len, ("x",), **arguments)  # type: ignore[arg-type]


def test_from_main_and_by_horovods_name(tmp_path: Path) -> None:
    """Notebooks define functions in `__main__`."""
    script = tmp_path / "main.py"
    script.write_text("import hvdlite.horovod_compat, horovod\nclass Answer:\n    value = 42\n"
                      "def work():\n    import os, horovod\n    return Answer.value + int(os.environ['HOROVOD_RANK'])\n"
                      "if __name__ == '__main__':\n    print(horovod.run(work, num_proc=2))\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=HANGS_SECONDS, check=False)
    assert ended.stdout == "[42, 43]\n", ended.stderr


def test_the_job_ends_with_its_caller(tmp_path: Path) -> None:
    script = ("import hvdlite, time\ndef work():\n    print('ready', flush=True)\n    time.sleep(1000)\n"
              "hvdlite.run(work, np=2)")
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "TMPDIR": str(tmp_path)})
    assert caller.stdout is not None
    while "ready" not in caller.stdout.readline():
        pass
    caller.kill()
    caller.wait()
    for _ in range(150):
        if not marked_processes(f"TEST_JOB={tmp_path}".encode()) and not list(tmp_path.glob("hvdlite-*")):
            return
        signal.sigtimedwait([], 0.1)
    raise AssertionError("ranks are left")


def test_an_interrupt_ends_the_job_and_is_raised(tmp_path: Path) -> None:
    script = ("import hvdlite, time\ndef work():\n    print('ready', flush=True)\n    time.sleep(1000)\n"
              "try:\n    hvdlite.run(work, np=2)\nexcept KeyboardInterrupt:\n    print('interrupted')")
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                              preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's `&` ignores it
    assert caller.stdout is not None
    while "ready" not in caller.stdout.readline():
        pass
    caller.send_signal(signal.SIGINT)
    out, _ = caller.communicate(timeout=HANGS_SECONDS)
    assert caller.returncode == 0 and out.endswith("interrupted\n")


def test_in_a_notebook() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    cells = ["factor = 3\ndef train(x):\n    import hvdlite as hvd, numpy as np\n    hvd.init()\n"
             "    print('on rank', hvd.rank())\n    return factor * int(hvd.allreduce(np.array(x), op=hvd.Sum))",
             "import hvdlite\nhvdlite.run(train, (2,), np=2)", "hvdlite.init(); hvdlite.size()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
    _, called, alone = (cell.outputs for cell in notebook.cells)
    assert called[-1]["data"]["text/plain"] == "[12, 12]" and alone[-1]["data"]["text/plain"] == "1"
    assert "[1]<stdout>:on rank 1" in "".join(output.get("text", "") for output in called)


def test_nothing_unsigned_is_unpickled(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    key = b"k" * 32
    assert verified(sign(b"content", key, "task"), key, "task") == b"content"
    bomb = cloudpickle.dumps(Bomb())
    for content in (bomb, sign(bomb, b"other" * 8, "task"), sign(bomb, key, "result 0"), sign(bomb, key, "task")[:-1], b""):
        (tmp_path / "task").write_bytes(content)
        with pytest.raises(ProtocolError, match="not signed with the job's key"):
            run_task.main({"HVDLITE_JOB_DIRECTORY": str(tmp_path), "HVDLITE_RANK": "0", "HVDLITE_SECRET": key.hex()})
    assert not (tmp_path / "exploded").exists()


def test_the_result_of_a_function_in_place_of_it_is_refused_and_one_rank_is_said_to_be_one(
        caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"pass the function, as in run\(train, np=2\), and not what it returns \(3\)"):
        hvdlite.run(3, np=2)  # type: ignore[arg-type]
    caplog.set_level("WARNING", "hvdlite")
    assert hvdlite.run(lambda: 5) == [5]
    assert "run() without np starts one rank" in caplog.text
