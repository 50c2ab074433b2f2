"""Which members a job has ended although nothing was done to them: from hvdrun's lines, and from what members told."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_ENDED = re.compile(
    r"^hvdrun: (?:rank (?P<rank>\d+)(?: \(process (?P<process>\d+)\))?|new process (?P<joiner>\d+)) on (?P<host>\S+?)"
    r"(?:: | left: )(?P<why>.*)$", re.MULTILINE)
_WITH_ITS_HOST = "lost with its host"


def spared(output: str, trained: Collection[int], told: Collection[int], hurt: Collection[int],
           hurt_hosts: Collection[str] = ()) -> Mapping[int, str]:
    """Return the members that were ended though nobody had hurt them, with the reason that hvdrun gives.

    Args:
        output: of hvdrun, with its lines about each member that has failed or left.
        trained: the members that have begun to train.
        told: those that have finished.
        hurt: those that were killed or stopped, or whose host was lost.
        hurt_hosts: the hosts that were lost, with members of which nobody knew.
    """
    ended: dict[int, str] = {}
    on_hurt_hosts: set[int] = set()
    for line in _ENDED.finditer(output):
        member = int(line["process"] or line["joiner"] or line["rank"])
        if line["host"] in hurt_hosts and _WITH_ITS_HOST in line["why"]:
            on_hurt_hosts.add(member)
        ended.setdefault(member, line[0].removeprefix("hvdrun: "))
    for member in set(trained) - set(told):
        ended.setdefault(member, f"member {member} has trained and not finished, and hvdrun prints no line about it")
    return {member: why for member, why in sorted(ended.items()) if member not in hurt and member not in on_hurt_hosts}
