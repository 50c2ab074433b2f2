"""Texts of exceptions and names of any kind reach the other ranks and the launcher."""

from __future__ import annotations

import msgspec
import pytest

from hvdlite.control.wire import KINDS, decode, encode
from hvdlite.core.errors import PeerFailedError, UnsupportedError
from hvdlite.core.frames import FrameReader, to_frame
from hvdlite.core.texts import LONGEST_MESSAGE, encodable, shortened, text_of
from hvdlite.negotiation.messages import FailureNotice, Report
from hvdlite.runtime.runtime import Runtime
from tests.worlds import threads


class Note(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A message with texts at several depths."""

    text: str
    texts: dict[str, list[str]]
    numbers: tuple[int, ...] = (1, 2)


def test_lone_surrogates_become_escapes_in_any_message() -> None:
    frames = FrameReader(msgspec.msgpack.Decoder(Note), 1000)
    assert frames.feed(to_frame(Note("a\udcff", {"\udc80": ["x", "\ud800"]}), 1000)) == [
        Note("a\\udcff", {"\\udc80": ["x", "\\ud800"]})]
    report = Report(epoch=0, applied=1, failure=FailureNotice(0, "ValueError", "bad \udcff"))
    kind, body = encode(report)
    assert kind == KINDS[Report]
    assert decode(kind, body) == Report(epoch=0, applied=1, failure=FailureNotice(0, "ValueError", "bad \\udcff"))
    assert encodable("é") == "é"


def test_long_texts_lose_their_middle() -> None:
    assert shortened("x" * 10, 10) == "x" * 10
    assert shortened("a" * 500 + "b" * 500, 100) == "a" * 50 + "\n[... 900 characters are left out ...]\n" + "b" * 50


def test_an_exception_whose_text_fails() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    assert text_of(Broken()) == "(its text cannot be had: KeyError)"


def test_an_exception_with_a_large_odd_text_reaches_the_other_ranks_shortened() -> None:
    def step(runtime: Runtime) -> None:
        if runtime.world.rank == 1:
            runtime.fail("ValueError", "\udcff" * 10_000_000, "traceback")
            return
        with pytest.raises(PeerFailedError, match=r"rank 1 failed with ValueError: \\udcff") as caught:
            runtime.barrier("x").wait()
        assert len(str(caught.value)) < 10 * LONGEST_MESSAGE
    threads(2, step)


def test_a_name_that_cannot_be_sent_is_an_error_of_the_call() -> None:
    def step(runtime: Runtime) -> None:
        with pytest.raises(UnsupportedError, match=r"'t\\udcff': the name of a tensor is sent as UTF-8"):
            runtime.barrier("t\udcff")
        runtime.barrier("é").wait()
    threads(2, step)
