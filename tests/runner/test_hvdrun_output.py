"""What `hvdrun` shows of its ranks' output."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from tests.runner.test_hvdrun import PYTHON, Running, _command, _environment, hvdrun
from tests.runner.test_hvdrun import nothing_is_left as nothing_is_left
from tests.worlds import HANGS_SECONDS


def test_a_progress_bar_of_a_rank_is_not_torn() -> None:
    ended = subprocess.run(_command(["-np", "1", PYTHON, "-c", "import sys; sys.stderr.write('\\r 50%\\r100%\\n')"]),
                           capture_output=True, timeout=HANGS_SECONDS, env=_environment(), check=True)
    assert ended.stderr == b"[0]<stderr>: 50%\r[0]<stderr>:100%\n"


@pytest.mark.parametrize("shown", ["rank0", "all"])
def test_a_long_traceback_of_a_rank_that_is_not_shown_is_printed_whole_and_once(shown: str) -> None:
    record = {"rank": 1, "origin": 1, "when": 1.0, "kind": "ValueError", "message": "boom", "traceback": "first",
              "shown": True}
    script = f"""[ $HVDLITE_RANK = 0 ] && exit 0; echo 'Traceback (most recent call last):' >&2; seq 100 >&2
                 printf %s {shlex.quote(json.dumps(record))} > $HVDLITE_JOB_DIRECTORY/failure.1.json; exit 1"""
    ended = hvdrun("-np", "2", "--show", shown, "sh", "-c", script)
    told = ["Traceback (most recent call last):", *map(str, range(1, 101))]
    assert ended.returncode == 1 and ended.stderr.splitlines() == [
        *(f"[1]<stderr>:{line}" for line in told), "hvdrun: rank 1 failed first: ValueError: boom (exit code 1)"]


def test_a_prompt_without_a_line_end_is_shown() -> None:
    ended = hvdrun("-np", "1", PYTHON, "-c", "print('continue? ', end='')")
    assert ended.stdout == "[0]<stdout>:continue? \n"


def test_a_reader_that_goes_away_does_not_end_the_job() -> None:
    run = Running("-np", "1", PYTHON, "-c", "import sys\nfor _ in range(20000): print('line')\nsys.exit(6)")
    assert run.process.stdout is not None
    run.wait_for("line")
    run.process.stdout.close()
    assert run.process.wait(HANGS_SECONDS) == 6


@pytest.mark.parametrize("program", ["import no_such_module", "import hvdlite; hvdlite.rank()"])
def test_what_all_ranks_fail_with_before_init_is_seen_once_and_without_our_frames(program: str) -> None:
    ended = hvdrun("-np", "3", PYTHON, "-c", program)
    lines, error = ended.stderr.splitlines(), ended.stderr.count("Error: ")
    assert ended.returncode == 1 and lines[0] == "[0-2]<stderr>:Traceback (most recent call last):", ended.stderr
    assert lines[-1].startswith("hvdrun: ranks 0-2 failed alike: ") and error == 2, ended.stderr
    assert "hvdlite/" not in ended.stderr and len(lines) <= 5
