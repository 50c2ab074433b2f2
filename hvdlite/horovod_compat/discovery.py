"""`horovod.runner.elastic.discovery`: the interface of host discovery, for programs that use or extend it.

hvdrun discovers hosts with `--host-discovery-script`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]


class HostDiscovery:
    """Finds hosts."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each host."""
        raise NotImplementedError


class HostDiscoveryScript(HostDiscovery):
    """Runs a program that prints a line for each host: `host:slots`, or `host`.

    Args:
        discovery_script: a command line.
        slots: of a host whose line has none.
    """

    def __init__(self, discovery_script: str, slots: int) -> None:
        self._discovery_script, self._default_slots = discovery_script, slots

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each host.

        Raises:
            RuntimeError: when the program fails.
            ValueError: for slots that are not a number.
        """
        ended = subprocess.run(self._discovery_script, shell=True, stdout=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            raise RuntimeError(f"the discovery script {self._discovery_script} ended with code {ended.returncode}")
        found = {}
        for line in ended.stdout.split():
            host, _, slots = line.partition(":")
            found[host] = int(slots) if slots else self._default_slots
        return found


class FixedHosts(HostDiscovery):
    """Knows its hosts.

    Args:
        host_slots: the number of slots of each host.
    """

    def __init__(self, host_slots: Mapping[str, int]) -> None:
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of slots of each host."""
        return self._host_slots

    def set(self, host_slots: Mapping[str, int]) -> None:
        """Replace the hosts."""
        self._host_slots = dict(host_slots)
