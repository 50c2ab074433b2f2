"""What the console makes of ranks' output: lines, prefixes, folding."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdlite_runner.output.console import LONGEST_LINE, Console, OutputSettings


class Screen:
    """Collects what the console writes."""

    def __init__(self, fold: int = 0, show: str = "all", clock: Callable[[], float] = lambda: 0.0) -> None:
        self.text = ""
        self.console = Console(self._write, OutputSettings(show=show), clock=clock)
        self.console.fold = fold

    def _write(self, name: str, text: str) -> None:
        self.text += text


def test_lines_are_prefixed_and_never_torn() -> None:
    screen = Screen()
    screen.console.feed(0, "stdout", b"hel")
    screen.console.feed(1, "stderr", b"other\n")
    screen.console.feed(0, "stdout", b"lo\nworld\nend")
    screen.console.finish()
    assert screen.text == "[1]<stderr>:other\n[0]<stdout>:hello\n[0]<stdout>:world\n[0]<stdout>:end\n"


def test_identical_lines_of_several_ranks_become_one_in_the_order_of_each_rank() -> None:
    now = [0.0]
    screen = Screen(fold=3, clock=lambda: now[0])
    for rank in (0, 2, 1):
        screen.console.feed(rank, "stdout", b"hello\n")
    assert screen.text == "[0-2]<stdout>:hello (x3)\n", "all have said it: nothing to wait for"
    screen.text = ""
    screen.console.feed(0, "stdout", b"a\nb\na\n")
    screen.console.feed(2, "stdout", b"b\na\n")
    screen.console.feed(0, "stderr", b"a\n")
    assert screen.text == "" and screen.console.flush_due() == pytest.approx(0.3)
    now[0] = 1.0
    assert screen.console.flush_due() is None
    assert screen.text == "[0]<stdout>:a\n[0,2]<stdout>:b (x2)\n[0,2]<stdout>:a (x2)\n[0]<stderr>:a\n"
    screen.console.feed(1, "stdout", b"late\n")
    screen.console.note("hvdrun: over")
    assert screen.text.endswith("[1]<stdout>:late\nhvdrun: over\n")


def test_what_is_not_shown_can_be_revealed() -> None:
    screen = Screen(show="rank0")
    screen.console.feed(0, "stdout", b"zero\n")
    screen.console.feed(1, "stderr", b"".join(b"line %d\n" % line for line in range(100)))
    assert screen.text == "[0]<stdout>:zero\n"
    screen.console.reveal(1)
    screen.console.reveal(1)
    assert screen.text.splitlines()[1:] == [f"[1]<stderr>:line {line}" for line in range(60, 100)]


def test_a_traceback_that_is_not_shown_is_known_and_can_be_revealed() -> None:
    screen = Screen(show="rank0")
    text = TRACEBACK.format("ValueError: x\n" + "\n".join(f"  more {line}" for line in range(50)))
    for rank in range(3):
        screen.console.feed(rank, "stderr", b"before\n" + text.encode())
    screen.console.feed(2, "stderr", b"0/3\r3/3\n")
    screen.console.reveal(1)
    assert screen.text.splitlines() == ["[0]<stderr>:before", "[1]<stderr>:before",
                                        *(f"[1]<stderr>:{line}" for line in text.splitlines())]
    assert screen.console.last_blocks == {1: text.strip()}
    screen.console.reveal(2)
    assert screen.text.splitlines()[-1] == "[2]<stderr>:3/3"
    screen.console.finish()
    assert screen.console.last_blocks == {0: text.strip(), 1: text.strip()}


def test_characters_split_between_reads_survive_and_broken_ones_do_not_stop_us() -> None:
    screen = Screen()
    for byte in "é€\n".encode():
        screen.console.feed(0, "stdout", bytes([byte]))
    screen.console.feed(0, "stdout", b"\xff\n")
    assert screen.text == "[0]<stdout>:é€\n[0]<stdout>:�\n"


def test_a_progress_bar_is_overwritten_in_place_by_its_own_rank_only() -> None:
    screen = Screen()
    screen.console.feed(0, "stderr", b"\r 10%\r 20%\r")
    screen.console.feed(0, "stderr", b" 30%\r")
    screen.console.feed(1, "stdout", b"between\n")
    screen.console.feed(0, "stderr", b" 40%\n")
    assert screen.text == ("[0]<stderr>: 10%\r[0]<stderr>: 20%\r\n[1]<stdout>:between\n"
                           "[0]<stderr>: 30%\r[0]<stderr>: 40%\n")


def test_windows_line_ends_are_line_ends() -> None:
    screen = Screen()
    screen.console.feed(0, "stdout", b"a\r")
    screen.console.feed(0, "stdout", b"\nb\r\n")
    assert screen.text == "[0]<stdout>:a\n[0]<stdout>:b\n"


def test_a_line_without_an_end_is_written_in_linear_time_and_on_one_line() -> None:
    """The tests' time limit is the assertion: 100 kB took minutes when every feed scanned the whole line again."""
    screen = Screen()
    for _ in range(64):
        screen.console.feed(0, "stdout", bytes(1 << 16))
    assert screen.text == "[0]<stdout>:" + "\0" * (64 << 16)
    screen.console.feed(0, "stdout", b"end\n")
    assert screen.text.endswith("\0end\n")
    screen.text = ""
    for _ in range(LONGEST_LINE - 1):
        screen.console.feed(0, "stdout", b"x")
    assert screen.text == ""
    screen.console.feed(0, "stdout", b"x")
    screen.console.feed(1, "stderr", b"between\n")
    screen.console.feed(0, "stdout", b"rest\n")
    line = "x" * LONGEST_LINE
    assert screen.text == f"[0]<stdout>:{line}\n[1]<stderr>:between\n[0]<stdout>:rest\n"


def test_only_the_end_of_a_line_that_was_left_makes_no_empty_line() -> None:
    screen = Screen()
    screen.console.feed(0, "stdout", b"x" * LONGEST_LINE)
    screen.console.note("hvdrun: here")
    screen.console.feed(0, "stdout", b"\nnext\n")
    screen.console.feed(0, "stdout", b"y" * LONGEST_LINE)
    screen.console.finish()
    assert screen.text == "[0]<stdout>:" + "x" * LONGEST_LINE + "\nhvdrun: here\n[0]<stdout>:next\n[0]<stdout>:" \
        + "y" * LONGEST_LINE + "\n"


def test_many_waiting_lines_are_folded_in_linear_time() -> None:
    screen = Screen(fold=2)
    screen.console.feed(0, "stdout", b"a\nb\n" * 20_000)
    screen.console.feed(1, "stdout", b"a\nb\n" * 20_000)
    assert screen.text == "[0-1]<stdout>:a (x2)\n[0-1]<stdout>:b (x2)\n" * 20_000


TRACEBACK = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    import b\n{}\n'


def test_equal_tracebacks_of_ranks_are_one_block_and_others_are_blocks_too() -> None:
    screen = Screen()
    screen.console.processes = 4
    same, other = TRACEBACK.format("ImportError: b").encode(), TRACEBACK.format("KeyError: 'b'\nwith a second line").encode()
    torchs = "".join(f"[rank3]: {line}\n" for line in other.decode().splitlines()).encode()
    for part in range(0, 200, 20):  # they come in pieces, at the same time
        for rank in range(3):
            screen.console.feed(rank, "stderr", same[part:part + 20] or b"")
        screen.console.feed(3, "stderr", torchs[part:part + 20] or b"")
    screen.console.finish()
    lines = screen.text.splitlines()
    assert lines == [f"[0-2]<stderr>:{line}" for line in same.decode().splitlines()] + [
        f"[3]<stderr>:{line}" for line in other.decode().splitlines()]
    assert screen.console.last_blocks == {0: same.decode().strip(), 1: same.decode().strip(), 2: same.decode().strip(),
                                          3: other.decode().strip()}


SYNTAX = '  File "/a/train.py", line 1\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'
USAGE = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: -np 2\n"


@pytest.mark.parametrize("text", [SYNTAX, USAGE, "/a/bin/python3.11: No module named train\n"])
def test_equal_failures_without_a_traceback_are_one_block_too(text: str) -> None:
    screen = Screen()
    screen.console.processes = 3
    for rank in range(3):
        screen.console.feed(rank, "stderr", text.encode())
    for rank in range(3):
        screen.console.feed(rank, "stderr", b"")
    assert [line.partition(" (x")[0] for line in screen.text.splitlines()] == [f"[0-2]<stderr>:{line}"
                                                                               for line in text.splitlines()]
    assert set(screen.console.last_blocks) == {0, 1, 2}


def test_what_a_rank_logs_of_anothers_failure_is_left_out() -> None:
    screen = Screen()
    screen.console.processes = 2
    text = TRACEBACK.format("ValueError: x").encode()
    log = b"2026-11-28 05:42:10,107 [0] hvdlite ERROR: rank 0: rank 1 failed with ValueError: x\n"
    screen.console.feed(1, "stderr", text)
    screen.console.feed(0, "stderr", text + log)
    screen.console.finish()
    assert screen.text.splitlines() == [f"[0-1]<stderr>:{line}" for line in text.decode().splitlines()]
    assert screen.console.last_blocks[0] == screen.console.last_blocks[1]


def test_a_traceback_of_a_rank_that_goes_on_is_written_before_what_other_ranks_say_of_it() -> None:
    now = [0.0]
    screen = Screen(clock=lambda: now[0])
    screen.console.processes = 2
    text = TRACEBACK.format("KeyError: 'b'")
    screen.console.feed(1, "stderr", text.encode())
    assert screen.text == "" and screen.console.flush_due() == pytest.approx(0.5)
    screen.console.feed(0, "stderr", b"rank 0 ended\n")
    assert screen.text.endswith("[1]<stderr>:KeyError: 'b'\n[0]<stderr>:rank 0 ended\n")
    screen.console.feed(1, "stderr", text.encode())
    now[0] = 0.5
    assert screen.console.flush_due() == pytest.approx(0.5), "other ranks may have the same one"
    now[0] = 1.0
    assert screen.console.flush_due() is None and screen.text.count("KeyError") == 2
    assert screen.console.last_blocks == {1: text.strip()}
    screen.console.feed(1, "stderr", b"it goes on\n")
    assert screen.console.last_blocks == {}


def test_what_follows_a_traceback_on_its_stream_is_written_after_it() -> None:
    screen = Screen()
    text = TRACEBACK.format("RuntimeError: first\n  detail")
    screen.console.feed(0, "stderr", text.encode() + b"\r0/3\r1/3")
    screen.console.finish()
    lines = [f"[0]<stderr>:{line}\n" for line in text.splitlines()]
    assert screen.text == "".join(lines) + "[0]<stderr>:0/3\r[0]<stderr>:1/3\n"
    assert screen.console.last_blocks == {}, "the rank has gone on"


def test_what_ranks_write_of_ctrl_c_is_left_out() -> None:
    screen = Screen()
    screen.console.drops_interrupts = True
    screen.console.feed(0, "stderr", TRACEBACK.format("KeyboardInterrupt").encode())
    screen.console.feed(1, "stderr", b"rank 0 failed with KeyboardInterrupt: \nmine\n")
    screen.console.finish()
    assert screen.text == "[1]<stderr>:mine\n"
