"""Members of an elastic job, one of which sends hvdrun too much, or what no member would say; the others train on."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.bootstrap.member_client import MemberClient
from hvdlite.core.frames import to_frame
from hvdlite.membership import messages
from hvdlite.training import elastic
from hvdlite.training.elastic.state import ObjectState

ESCAPES = "\x1b]0;escaped\x07\x1b[2J\x9b31m"
_ANY_SIZE = 1 << 30


def flood(chance: random.Random) -> Iterator[bytes]:
    """Return valid messages without end, of a few bytes or of the most that is allowed."""
    content = chance.choice([messages.frame(messages.Alive(1, False)) * 2000, messages.frame(messages.MemberReady()),
                             messages.frame(messages.MeetingFailed(1, ESCAPES + "x" * 1_000_000))])
    while True:
        yield content


def large(chance: random.Random) -> Iterator[bytes]:
    """Return one message with a number, or of a size, that cannot be."""
    yield chance.choice([to_frame(messages.BoundaryReport(1, 2**64 - 1), _ANY_SIZE),
                         to_frame(messages.MemberIdle(1, messages.StateReport(commits=2**64 - 1), ESCAPES), _ANY_SIZE),
                         to_frame(messages.MemberIdle(1, messages.StateReport(), "x" * (1 << 21)), _ANY_SIZE)])


def lies(chance: random.Random) -> Iterator[bytes]:
    """Return messages that are well formed, and not true."""
    def number() -> int:
        return chance.choice([0, 1, 2, 3, 99, 2**47])

    some: list[messages.MembershipMessage] = [
        messages.Met(number()), messages.MemberReady(), messages.BoundaryReport(number(), number()),
        messages.Alive(number(), chance.random() < 0.5), messages.Listening(number(), (ESCAPES, ""), 1),
        messages.MemberFinished(number()), messages.MemberHello(number(), 1),
        messages.MeetingFailed(number(), ESCAPES, (number(), number())),
        messages.MemberIdle(number(), messages.StateReport(commits=number(), has_state=chance.random() < 0.5), ESCAPES)]
    for message in chance.choices(some, k=chance.randrange(1, 20)):
        yield messages.frame(message)


MODES = {each.__name__: each for each in (flood, large, lies)}


def main(mode: str, culprit: int, step: int, seed: int, told: Path) -> None:
    """Train a little.

    Args:
        culprit: the rank that sends something.
        step: at which it does.
        told: the file that it then makes.
    """
    members: list[MemberClient] = []
    begin = MemberClient.__init__

    def noted(self: MemberClient, *given: Any) -> None:
        members.append(self)
        begin(self, *given)

    MemberClient.__init__ = noted  # type: ignore[assignment, method-assign]
    hvd.init()
    is_culprit = hvd.rank() == culprit
    state = ObjectState(step=0)

    def send() -> None:
        for content in MODES[mode](random.Random(seed)):
            with members[-1]._send_lock:  # else frames of two threads mix, and none is as it was meant
                members[-1]._socket.sendall(content)

    @elastic.run
    def train(state: ObjectState) -> None:
        while state.step < 100:
            if is_culprit and state.step == step:
                told.touch()
                threading.Thread(target=send, daemon=True).start()
            hvd.allreduce(np.ones(3), name="gradient")
            time.sleep(0.01)
            state.step += 1
            if state.step % 10 == 0:
                state.commit()

    train(state)
    print("trained", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
