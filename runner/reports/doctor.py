"""`hvdrun --doctor`: problems of hosts, interfaces, ssh and libraries, one line each, and then the facts."""

from __future__ import annotations

import itertools
import json
import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from hvdlite.core.errors import LaunchError
from hvdlite.core.texts import printable
from hvdlite.membership.events import Limits
from hvdlite_runner.agents import host_probe
from hvdlite_runner.agents.gpu_topology import topology_hints, topology_lines
from hvdlite_runner.agents.remote_agent import CONNECT_SECONDS, RemoteAgent, Shell
from hvdlite_runner.job.hosts import HostPool
from hvdlite_runner.job.settings import JobSettings
from hvdlite_runner.job.starts import probed
from hvdlite_runner.messages import HostInfoReply, HostInfoRequest, SpeedReply, SpeedRequest
from hvdlite_runner.placement import LOCAL, Host

_FACTS_SECONDS: Final = 120.0  # frameworks may be imported from a cold disk
_SMALL: Final = {"files": (1024, "", "each rank opens some hundred files and sockets: ulimit -n 65536"),
                 "memlock": (1 << 26, "infiniband", "InfiniBand locks memory: ulimit -l unlimited"),
                 "shm": (1 << 30, "gpus", "NCCL shares memory between ranks: docker run --shm-size=4g")}
"""For each limit: the value below which to warn, the library it matters to, and the advice."""
_NCCL: Final = ("NCCL (nvidia-nccl-cu12)", "NCCL (nvidia-nccl-cu13)")

_MODELS: Final = {"ResNet-50": 102.4e6, "GPT-2 (124 M)": 496e6}
"""Bytes of gradients in float32, as in docs/slow-links.md."""


def run_doctor(hosts: Sequence[Host], shell: Shell, directory: str, environ: Mapping[str, str], scheduler: str,
               as_json: bool) -> int:
    """Print the problems and facts of the hosts and of the connections between them; return 1 if there are problems, else 0.

    Args:
        scheduler: the name of the scheduler whose allocation this process is in; "" for none.
    """
    found = {"scheduler": scheduler, **probe_hosts(hosts, shell, directory, environ)}
    found["problems"] = list(problems(found))
    print(json.dumps(found, indent=1) if as_json else printable("\n".join(text(found))))
    return 1 if found["problems"] else 0


def probe_hosts(hosts: Sequence[Host], shell: Shell, directory: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return {"hosts": facts by name, "unreachable": lines, "pairs": speeds}; a failing host does not stop the others."""
    found: dict[str, Any] = {"hosts": {}, "unreachable": [], "pairs": []}
    with selectors.DefaultSelector() as selector:
        slots = {host.name: host.slots for host in hosts}
        settings = JobSettings((), Limits(1, one_world=True), slots, shell=shell, working_directory=directory,
                               start_timeout=2.0 * CONNECT_SECONDS)
        pool = HostPool(selector, settings, environ, checks_silence=False)
        try:
            pool.set_slots(slots)
            while pool.turn(now := time.monotonic()) is None:
                pool.take_events(pool.wait(now))
            found["unreachable"] = "\n".join(pool.problems()).splitlines()
            present = [remote for remote in pool.remotes if not remote.over]
            if LOCAL in pool.slots_of(LOCAL):
                found["hosts"][LOCAL] = host_probe.host_info(environ)
            for remote, answer in pool.ask({remote: HostInfoRequest() for remote in present}, HostInfoReply,
                                           _FACTS_SECONDS).items():
                found["hosts"][remote.host.name] = answer.facts
            ends: list[RemoteAgent | None] = [None] if LOCAL in found["hosts"] else []
            for first, second in itertools.combinations([*ends, *present], 2):
                found["pairs"].append(_pair(pool, first, second))
        finally:
            pool.stop()
            pool.end(CONNECT_SECONDS)
    return found


def _pair(pool: HostPool, first: RemoteAgent | None, second: RemoteAgent | None) -> dict[str, Any]:
    """Measure latency and bandwidth between two hosts; None as the first is the launcher's own."""
    assert second is not None
    pair = {"from": second.host.name, "to": first.host.name if first is not None else LOCAL}
    try:
        with probed(pool, first, [second.host.address]) as (routed, _):
            speed = pool.ask({second: SpeedRequest(routed.addresses, routed.port)}, SpeedReply)[second]
    except LaunchError as error:
        return {**pair, "problem": str(error)}
    if speed.problem:
        return {**pair, "problem": speed.problem}
    return {**pair, "round_trip_seconds": speed.seconds, "bytes_per_second": speed.bandwidth}


def problems(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each problem, with the host's name."""
    yield from found["unreachable"]
    for pair in found["pairs"]:
        if "problem" in pair:
            yield f"host {pair['from']} does not reach host {pair['to']}: {pair['problem']}"
    hosts = found["hosts"]
    for name, facts in hosts.items():
        if facts["build_problem"]:
            yield f"host {name}: hvdlite does not work: {facts['build_problem']}"
        missing = facts["build"].get("planes", {}).get("nccl", {}).get("missing")
        if missing and facts["gpus"] and "PyTorch" in facts["build"]["installed"]:
            yield f"host {name} does not use its GPUs: {missing}"
        if len(hosts) > 1 and name != LOCAL and not any(address for interface, addresses in facts["interfaces"].items()
                                                        if interface != "lo" for address in addresses):
            yield f"host {name} has no network interface but the loopback"
        yield from (f"host {name}: {problem}" for problem in _gpu_problems(facts))
    for what in ("python", "hvdlite", "PyTorch", "TensorFlow", *_NCCL):
        versions = {name: _version(facts, what) for name, facts in hosts.items()}
        if len(set(versions.values())) > 1:
            yield f"{what} differs: " + ", ".join(f"{version or 'none'} on {name}" for name, version in versions.items())


def _gpu_problems(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a host's driver and CUDA packages."""
    topology, installed = facts["topology"], facts["build"].get("installed", {})
    driver = topology.get("cuda", "")
    for name, version in installed.items():
        if driver and name.startswith("CUDA (") and int(version.split(".")[0]) > int(driver.split(".")[0]):
            yield (f"the driver {topology['driver']} is for CUDA {driver}, and {name[6:-1]} {version} needs a newer one: "
                   f"update the driver, or install the packages for CUDA {driver.split('.')[0]}")
    if facts["bandwidth_problem"]:
        yield f"copies between GPUs were not measured: {facts['bandwidth_problem']}"


def hints(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the possible problems of a host."""
    yield from topology_hints(facts["topology"])
    for name, (least, needed_by, advice) in _SMALL.items():
        value = facts["limits"].get(name, -1)
        if 0 <= value < least and (not needed_by or facts[needed_by]):
            yield f"{name} is limited to {_number(name, value)}: {advice}"


def _version(facts: Mapping[str, Any], what: str) -> str:
    if what == "python":
        return ".".join(facts["python"].split(".")[:2])
    build = facts["build"]
    return str(build.get("hvdlite", "") if what == "hvdlite" else build.get("installed", {}).get(what, ""))


def text(found: Mapping[str, Any]) -> list[str]:
    """Return the text of the report: problems first."""
    lines = [f"problem: {problem}" for problem in found["problems"]] or ["no problem found"]
    if found["scheduler"]:
        lines.append(f"inside an allocation of {found['scheduler']}")
    for name, facts in found["hosts"].items():
        lines += ["", f"host {name} ({facts['hostname']}): {facts['cores']} cores, Python {facts['python']} "
                  f"({facts['executable']})", *(f"    {line}" for line in _host_lines(facts))]
    if found["pairs"]:
        lines += ["", "between hosts, one TCP connection:"]
        lines += [f"    {pair['from']} - {pair['to']}: " + (pair.get("problem") or
                  f"round trip {pair['round_trip_seconds'] * 1e6:,.0f} us, {pair['bytes_per_second'] / 1e6:,.0f} MB/s")
                  for pair in found["pairs"]]
        rates = [pair["bytes_per_second"] for pair in found["pairs"] if "problem" not in pair]
        count = max(2, len(found["hosts"]))
        if rates:
            lines.append(f"what {count} hosts bring over one, by the slowest of these links, without overlap with backward:")
        for name, size in _MODELS.items() if rates else ():
            seconds = exchange_seconds(size, min(rates), count)
            lines.append(f"    {name}, {size / 1e6:,.0f} MB of gradients: {seconds:.2g} s more in each step; faster than "
                         f"one host if its step takes more than {seconds / (count - 1):.2g} s, else see docs/slow-links.md")
    return lines


def exchange_seconds(size: float, bytes_per_second: float, hosts: int) -> float:
    """Return how much longer a step takes with hosts that each send `size` bytes of gradients over one link.

    N hosts train faster than one if a step of one takes longer than this divided by N - 1.
    """
    return 2 * (hosts - 1) / hosts * size / bytes_per_second


def _host_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    build = facts["build"]
    if build:
        installed = ", ".join(f"{name} {version}" for name, version in build["installed"].items())
        yield f"hvdlite {build['hvdlite']}; {installed or 'no framework'}"
        for plane, state in build["planes"].items():
            yield f"plane {plane}: {state['missing'] or 'ready'}"
        if "environment" in build:
            yield f"launch environment: {build['environment']}"
    yield "launchers: " + (", ".join(facts["launchers"].values()) or "none")
    yield "interfaces: " + "; ".join(f"{name} {' '.join(addresses)}" for name, addresses in facts["interfaces"].items())
    yield f"ssh: {facts['ssh'] or 'none (Debian: openssh-client)'}"
    if facts["infiniband"]:
        yield "InfiniBand: " + ", ".join(facts["infiniband"])
    yield "GPUs: " + ("; ".join(facts["gpus"]) or "none")
    if facts["gpus"] or not facts["topology"]["missing"]:
        yield from topology_lines(facts["topology"], facts["bandwidth"])
    yield "limits: " + ", ".join(f"{name} {_number(name, value)}" for name, value in facts["limits"].items())
    yield from (f"note: {hint}" for hint in hints(facts))


def _number(name: str, value: int) -> str:
    if value < 0:
        return "unlimited"
    return f"{value / 2**20:,.0f} MiB" if name in ("memlock", "shm", "shm_free") else f"{value}"
