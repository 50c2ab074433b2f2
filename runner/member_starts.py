"""How members of an elastic job are started: where, with which variables, and with how many cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvdlite.core import launch_contract
from hvdlite.core.world import Hosts, World
from hvdlite.membership.events import StartMember
from hvdlite_runner import messages
from hvdlite_runner.commands import to_bytes, values_to_bytes
from hvdlite_runner.elastic_hosts import HostPool
from hvdlite_runner.job import JobSettings
from hvdlite_runner.job_workers import JobWorkers
from hvdlite_runner.placement import Host


class MemberStarts:
    """Makes the orders that start members.

    Args:
        max_np: the greatest number of ranks; None: every slot is used.
        key: the job's key.

    Attributes:
        notice: a line for the user, once.
    """

    def __init__(self, settings: JobSettings, max_np: int | None, workers: JobWorkers, hosts: HostPool, key: str) -> None:
        self._settings, self._max_np, self._workers, self._hosts, self._key = settings, max_np, workers, hosts, key
        self.notice = ""

    def orders(self, starting: Sequence[StartMember]) -> list[tuple[str, messages.StartMember]]:
        """Return the machine of each member and the order that starts it.

        Raises:
            LaunchError: when the founders' machines cannot reach each other.
        """
        founders = sorted((each for each in starting if not each.is_joiner), key=lambda each: each.rank)
        machines = [self._hosts.machine_of(each.host) for each in founders]
        layout = Hosts.of(machines)
        rendezvous = {launch_contract.SECRET: self._key}
        if self._settings.coordinator_port:
            rendezvous[launch_contract.COORDINATOR_PORT] = str(self._settings.coordinator_port)
        if len(layout.ranks_by_host) > 1:
            rendezvous[launch_contract.COORDINATOR] = self._workers.rendezvous_address(
                [Host(machine) for machine in dict.fromkeys(machines)], self._settings.interfaces,
                self._settings.coordinator_port)
        if founders and self._settings.share_cores:
            threads = {machine: self._threads(machine) for machine in dict.fromkeys(machines)}
            each = ", ".join(f"{count} on {machine}" for machine, count in threads.items())
            count = next(iter(threads.values()))
            self.notice = (f"OMP_NUM_THREADS={count if len(threads) == 1 else each} (cores for each slot); set it yourself "
                           "to change that")
        made = [self._order(each, layout.world(each.rank), rendezvous) for each in founders]
        made += [self._order(each, self._provisional(each), rendezvous) for each in starting if each.is_joiner]
        return made

    def _order(self, each: StartMember, world: World, rendezvous: dict[str, str]) -> tuple[str, messages.StartMember]:
        machine = self._hosts.machine_of(each.host)
        own = {launch_contract.MEMBER: str(each.member), launch_contract.SLOT: str(each.slot),
               launch_contract.HOSTNAME: each.host, launch_contract.ELASTIC: "1"}
        if each.is_joiner:
            own[launch_contract.JOINER] = "1"
        threads = {"OMP_NUM_THREADS": str(self._threads(machine))} if self._settings.share_cores else {}
        share = None
        if self._settings.bind:
            slots = self._hosts.slots_of(machine)
            place = sum(count for name, count in list(slots.items())[:list(slots).index(each.host)]) + each.slot
            share = (place, max(place + 1, sum(slots.values())))
        return machine, messages.StartMember(each.member, dataclasses.astuple(world), to_bytes(self._settings.command),
                                           values_to_bytes({**threads, **self._settings.environment, **rendezvous, **own}),
                                           share)

    def _provisional(self, each: StartMember) -> World:
        """Return a joiner's first coordinates; its local rank, by which scripts choose a GPU, is its slot."""
        return World(each.rank, max(each.size, each.slot + 1), each.slot, each.slot + 1)

    def _threads(self, machine: str) -> int:
        """Return the cores for each of the processes that may run on a machine."""
        slots = sum(self._hosts.slots_of(machine).values())
        return max(1, self._workers.cores(machine) // max(1, min(slots, self._max_np or slots)))
