"""Matching of messages, against the rule as a list of pairs."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from hvdlite.groups.matching import ANY, Matching


@dataclasses.dataclass(eq=False)
class Wanted:
    peer: int
    tag: int


@dataclasses.dataclass(eq=False)
class Arrived:
    source: int
    tag: int


def fits(receive: Wanted, message: Arrived) -> bool:
    return receive.tag == message.tag and receive.peer in (ANY, message.source)


@pytest.mark.parametrize("seed", range(20))
def test_first_receive_gets_first_message(seed: int) -> None:
    """The naive rule: lists in the order of events, searched from the front."""
    rng = random.Random(seed)
    matching: Any = Matching()
    receives: list[Wanted] = []
    messages: list[Arrived] = []
    met = 0
    for _ in range(2000):
        tag, source = rng.randrange(3), rng.randrange(3)
        event = rng.random()
        if event < 0.45:
            receive = Wanted(rng.choice((ANY, source)), tag)
            expected = next((message for message in messages if fits(receive, message)), None)
            assert matching.receive(receive) is expected
            if expected is None:
                receives.append(receive)
            else:
                messages.remove(expected)
                met += 1
        elif event < 0.9:
            message = Arrived(source, tag)
            found = next((receive for receive in receives if fits(receive, message)), None)
            assert matching.arrive(source, tag) is found
            if found is None:
                matching.keep(message)
                messages.append(message)
            else:
                receives.remove(found)
                met += 1
        elif receives:
            receive = rng.choice(receives)
            matching.withdraw(receive)
            receives.remove(receive)
            matching.withdraw(receive)  # again, and of one that has its message: nothing happens
        assert sorted(map(id, matching.messages())) == sorted(map(id, messages))
        assert matching.wants(source) == any(receive.peer in (ANY, source) for receive in receives)
    assert met > 500
