"""A host's GPUs and how they are connected: from NVML (the package nvidia-ml-py) and sysfs.

No GPU is used, and no CUDA context is made.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_READ: Final = 0
"""NVML_P2P_CAPS_INDEX_READ, which is a tuple in nvidia-ml-py by mistake."""
_MOST_LINKS: Final = 36
"""NVML_NVLINK_MAX_LINKS."""
_SWITCH: Final = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""
_PATHS: Final = {0: "one board", 10: "one PCIe switch", 20: "PCIe switches", 30: "one host bridge", 40: "one NUMA node",
                 50: "two NUMA nodes"}
"""NVML_TOPOLOGY_...: what the two ends have in common."""
_P2P: Final = {0: "", 1: "the chipset does not support it", 2: "the GPU does not support it",
               3: "the PCIe topology does not support it", 4: "the driver's settings turn it off", 5: "it is not supported"}
"""NVML_P2P_STATUS_..."""


def gpu_topology(sysfs: Path = Path("/sys")) -> dict[str, Any]:
    """Return facts of this host's GPUs, or {"missing": why there are none}."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {"missing": "needs nvidia-ml-py: pip install nvidia-ml-py (the extras nccl-cuda12 and nccl-cuda13 have it)"}
    try:
        nvml.nvmlInit()
        try:
            return read_topology(nvml, sysfs)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return {"missing": f"NVML: {error}"}


def read_topology(nvml: Any, sysfs: Path) -> dict[str, Any]:
    """Return the driver's version, the GPUs, and each pair of them; only strings, numbers, lists and dictionaries.

    Args:
        nvml: the module `pynvml`, initialised.
    """
    def ask(function: str, *arguments: Any) -> Any:
        """Return an answer; None if NVML has none, which depends on the GPU and on the driver."""
        try:
            return getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    ports = _ports(sysfs)
    gpus: list[dict[str, Any]] = []
    links: list[dict[str, int]] = []
    for index, handle in enumerate(handles):
        address = _address(nvml.nvmlDeviceGetPciInfo(handle))
        device = sysfs / "bus/pci/devices" / address
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        links.append(_links(handle, ask))
        gpus.append({"index": index, "name": _text(ask("nvmlDeviceGetName", handle) or "?"), "address": address,
                     "memory": 0 if memory is None else int(memory.total), "numa": _numa(device),
                     "pcie": [ask(f"nvmlDeviceGetMaxPcieLink{what}", handle) for what in ("Generation", "Width")],
                     "mig": bool((ask("nvmlDeviceGetMigMode", handle) or [0])[0]), "nvlinks": sum(links[-1].values()),
                     "interface": _nearest(_place(device), _numa(device), ports)})
    pairs = []
    for first, second in itertools.combinations(range(len(handles)), 2):
        ancestor = ask("nvmlDeviceGetTopologyCommonAncestor", handles[first], handles[second])
        status = ask("nvmlDeviceGetP2PStatus", handles[first], handles[second], _READ)
        direct = links[first].get(gpus[second]["address"], 0)
        through = min(links[first].get("switch", 0), links[second].get("switch", 0))
        pairs.append({"gpus": [first, second], "nvlinks": direct or through, "through_switch": not direct and through > 0,
                      "path": _PATHS.get(ancestor, "?"), "p2p": status == 0,
                      "p2p_problem": _P2P.get(status, "NVML does not tell why" if status is not None else "unknown")})
    version = ask("nvmlSystemGetCudaDriverVersion_v2")
    return {"missing": "", "driver": _text(ask("nvmlSystemGetDriverVersion") or "?"),
            "cuda": f"{version // 1000}.{version % 1000 // 10}" if version else "", "gpus": gpus, "pairs": pairs}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _address(pci: Any) -> str:
    """Return a PCI address as sysfs writes it: NVML's has four digits more."""
    return _text(pci.busId).lower()[-12:]


def _links(handle: Any, ask: Callable[..., Any]) -> dict[str, int]:
    """Return how many active NVLinks a GPU has to each other one, by its PCI address, and to switches."""
    found: dict[str, int] = {}
    for link in range(_MOST_LINKS):
        if ask("nvmlDeviceGetNvLinkState", handle, link) != 1:
            continue
        remote = ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link)
        kind = ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link)
        name = "switch" if kind == _SWITCH or remote is None else _address(remote)
        found[name] = found.get(name, 0) + 1
    return found


def _place(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses from the host bridge to a device; () if sysfs does not have it."""
    if not device.exists():
        return ()
    return tuple(part for part in device.resolve().parts if part.startswith("pci") or part.count(":") == 2)


def _numa(device: Path) -> int:
    """Return the NUMA node of a PCI device; -1 if the host has one only, or does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return int((device / "numa_node").read_text(encoding="ascii"))
    return -1


def _ports(sysfs: Path) -> list[tuple[str, tuple[str, ...], int]]:
    """Return the name, the place and the NUMA node of each network device that is a PCI device."""
    rdma: dict[tuple[str, ...], list[str]] = {}
    for device in _entries(sysfs / "class/infiniband"):
        rdma.setdefault(_place(device / "device"), []).append(device.name)
    found = []
    for interface in _entries(sysfs / "class/net"):
        place = _place(interface / "device")
        if place:
            names = [interface.name, *(f"({name})" for name in rdma.pop(place, ()))]
            found.append((" ".join(names), place, _numa(interface / "device")))
    found += [(name, place, _numa(sysfs / "class/infiniband" / name / "device"))
              for place, names in rdma.items() if place for name in names]
    return found


def _entries(directory: Path) -> Sequence[Path]:
    return [directory / name for name in sorted(os.listdir(directory))] if directory.is_dir() else []


def _nearest(place: tuple[str, ...], numa: int, ports: Sequence[tuple[str, tuple[str, ...], int]]) -> str:
    """Return the network device that is nearest to a GPU, and what they have in common; "" if there is none."""
    def distance(port: tuple[str, tuple[str, ...], int]) -> tuple[int, bool]:
        common = itertools.takewhile(lambda parts: parts[0] == parts[1], zip(place, port[1], strict=False))
        return -len(list(common)), port[2] != numa

    nearest = min(ports, key=distance, default=None)
    if nearest is None or not place:
        return ""
    common, other_node = distance(nearest)
    # The first part is the host bridge, the second one its port; a switch comes after that.
    path = _PATHS[10 if common < -1 else 30 if common else 50 if other_node and numa >= 0 else 40]
    return f"{nearest[0]}, {path}"


def topology_lines(topology: Mapping[str, Any], bandwidths: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the text of a topology.

    Args:
        bandwidths: measured, by the GPUs' PCI addresses.
    """
    if topology["missing"]:
        yield f"GPU topology: {topology['missing']}"
        return
    yield f"GPU driver {topology['driver']}, for CUDA {topology['cuda'] or '?'} and older"
    for gpu in topology["gpus"]:
        generation, width = gpu["pcie"]
        parts = [gpu["name"], f"{gpu['memory'] / 2**30:,.0f} GiB", gpu["address"],
                 f"NUMA node {gpu['numa']}" if gpu["numa"] >= 0 else "", f"PCIe {generation} x{width}" if generation else "",
                 f"{gpu['nvlinks']} NVLinks" if gpu["nvlinks"] else "", "MIG" if gpu["mig"] else "",
                 f"nearest interface {gpu['interface']}" if gpu["interface"] else ""]
        yield f"GPU {gpu['index']}: " + "; ".join(part for part in parts if part)
    measured = {frozenset(each["gpus"]): each["bytes_per_second"] for each in bandwidths}
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for pair in topology["pairs"]:
        groups.setdefault(_connection(pair), []).append(pair)
    for connection, pairs in groups.items():
        speeds = [speed for pair in pairs if (speed := measured.get(frozenset(
            topology["gpus"][index]["address"] for index in pair["gpus"])))]
        names = "all pairs of GPUs" if len(groups) == 1 and len(pairs) > 1 else "GPUs " + ", ".join(
            "-".join(map(str, pair["gpus"])) for pair in pairs)
        yield f"{names}: {connection}" + (f"; copies at {_range(speeds)}" if speeds else "")


def _connection(pair: Mapping[str, Any]) -> str:
    link = f"{pair['nvlinks']} NVLinks" if pair["nvlinks"] else f"PCIe, {pair['path']}"
    return link + (" through NVSwitch" if pair["through_switch"] else "") + (
        ", P2P" if pair["p2p"] else f", no P2P ({pair['p2p_problem']})")


def _range(speeds: Sequence[float]) -> str:
    low, high = min(speeds) / 1e9, max(speeds) / 1e9
    return f"{low:,.0f} GB/s" if f"{low:.0f}" == f"{high:.0f}" else f"{low:,.0f} to {high:,.0f} GB/s"


def topology_hints(topology: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may make GPUs slow."""
    if topology["missing"]:
        return
    blocked = ["-".join(map(str, pair["gpus"])) for pair in topology["pairs"] if not pair["p2p"] and not pair["nvlinks"]]
    if blocked:
        yield (f"GPUs {', '.join(blocked)} do not access each other's memory: NCCL copies through the host's (often the "
               "IOMMU or ACS is on; see NCCL's troubleshooting)")
    counts = {gpu["nvlinks"] for gpu in topology["gpus"]}
    if len(counts) > 1:
        yield "the GPUs have different numbers of active NVLinks: " + ", ".join(
            f"GPU {gpu['index']} {gpu['nvlinks']}" for gpu in topology["gpus"])
