"""What the doctor tells about GPUs, from recorded topologies: NVML's answers and the part of sysfs that it reads."""

from __future__ import annotations

import copy
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hvdlite.planes.nccl.bandwidth import measure
from hvdlite_runner.agents import gpu_topology, host_probe
from hvdlite_runner.agents.gpu_topology import read_topology, topology_hints, topology_lines
from hvdlite_runner.reports.doctor import hints, problems, text
from tests.runner.test_doctor import HOST, found

RECORDS = Path(__file__).parent / "topologies"


class RecordedNvml:
    """Stands for the module `pynvml`: its functions, with the answers of a record."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_READ = (0,)  # as in nvidia-ml-py

    def __init__(self, record: dict[str, Any]) -> None:
        self._record, self._gpus = record, record["gpus"]
        self.is_initialised = False

    def nvmlInit(self) -> None:
        if self._record.get("fails"):
            raise self.NVMLError(self._record["fails"])
        self.is_initialised = True

    def nvmlShutdown(self) -> None:
        self.is_initialised = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self._record["driver"])

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return int(self._record["cuda"])

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return str(self._gpus[gpu]["name"])

    def nvmlDeviceGetPciInfo(self, gpu: int) -> Any:
        return types.SimpleNamespace(busId=self._gpus[gpu]["bus"].encode())

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:
        return types.SimpleNamespace(total=self._gpus[gpu]["memory"])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: int) -> int:
        return int(self._gpus[gpu]["pcie"][0])

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: int) -> int:
        return int(self._gpus[gpu]["pcie"][1])

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [self._known(self._gpus[gpu].get("mig")), 0]

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:
        self._link(gpu, link)
        return 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu: int, link: int) -> int:
        return int(self._link(gpu, link)["type"])

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:
        return types.SimpleNamespace(busId=self._link(gpu, link)["remote"].encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, first: int, second: int) -> int:
        return int(self._pair(first, second)["ancestor"])

    def nvmlDeviceGetP2PStatus(self, first: int, second: int, index: int) -> int:
        assert index == 0
        return int(self._pair(first, second)["p2p"])

    def _known(self, value: Any) -> Any:
        if value is None:
            raise self.NVMLError("Not Supported")
        return value

    def _link(self, gpu: int, link: int) -> Any:
        links = self._gpus[gpu]["links"]
        return self._known(links[link] if link < len(links) else None)

    def _pair(self, first: int, second: int) -> Any:
        return self._known(next((pair for pair in self._record["pairs"] if pair["gpus"] == [first, second]), None))


def record(name: str) -> dict[str, Any]:
    return json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def sysfs(recorded: dict[str, Any], root: Path) -> Path:
    """Write the part of sysfs that the record has."""
    for address, device in recorded["pci"].items():
        place = root.joinpath("devices", *device["path"])
        place.mkdir(parents=True)
        (place / "numa_node").write_text(f"{device['numa_node']}\n", encoding="ascii")
        (root / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (root / "bus/pci/devices" / address).symlink_to(place)
    for kind, devices in (("net", recorded["net"]), ("infiniband", recorded["infiniband"])):
        for name, address in devices.items():
            (root / "class" / kind / name).mkdir(parents=True)
            if address:
                (root / "class" / kind / name / "device").symlink_to(root / "bus/pci/devices" / address)
    return root


def read(recorded: dict[str, Any], root: Path) -> dict[str, Any]:
    topology = read_topology(RecordedNvml(recorded), sysfs(recorded, root))
    assert json.loads(json.dumps(topology)) == topology, "an agent sends it"
    return topology


def test_eight_gpus_with_nvswitches(tmp_path: Path) -> None:
    topology = read(record("dgx-h100"), tmp_path)
    addresses = [gpu["address"] for gpu in topology["gpus"]]
    measured = [{"gpus": [addresses[first], addresses[second]], "bytes_per_second": 368e9 + second * 1e9}
                for first in range(8) for second in range(first + 1, 8)]
    lines = list(topology_lines(topology, measured))
    assert lines[0] == "GPU driver 550.54.15, for CUDA 12.4 and older"
    assert lines[1] == ("GPU 0: NVIDIA H100 80GB HBM3; 80 GiB; 0000:1b:00.0; NUMA node 0; PCIe 5 x16; 18 NVLinks; "
                        "nearest interface ibp24s0 (mlx5_0), one PCIe switch")
    assert lines[8].endswith("0000:df:00.0; NUMA node 1; PCIe 5 x16; 18 NVLinks; nearest interface ibp220s0 (mlx5_7), one "
                             "PCIe switch")
    assert lines[9:] == ["all pairs of GPUs: 18 NVLinks through NVSwitch, P2P; copies at 369 to 375 GB/s"]
    assert not list(topology_hints(topology))


def test_a_gpu_whose_links_are_down(tmp_path: Path) -> None:
    recorded = record("dgx-h100")
    del recorded["gpus"][3]["links"][12:]
    topology = read(recorded, tmp_path)
    lines = list(topology_lines(topology, ()))
    assert "GPUs 0-3, 1-3, 2-3, 3-4, 3-5, 3-6, 3-7: 12 NVLinks through NVSwitch, P2P" in lines
    (hint,) = topology_hints(topology)
    assert "different numbers of active NVLinks: GPU 0 18" in hint and "GPU 3 12" in hint


def test_two_gpus_at_two_sockets_without_p2p(tmp_path: Path) -> None:
    topology = read(record("workstation"), tmp_path)
    lines = list(topology_lines(topology, ()))
    assert lines[1].endswith("0000:17:00.0; NUMA node 0; PCIe 4 x16; nearest interface enp4s0, one NUMA node")
    assert lines[2].endswith("0000:b3:00.0; NUMA node 1; PCIe 4 x16; nearest interface enp4s0, two NUMA nodes")
    assert lines[3:] == ["GPUs 0-1: PCIe, two NUMA nodes, no P2P (the chipset does not support it)"]
    (hint,) = topology_hints(topology)
    assert hint.startswith("GPUs 0-1 do not access each other's memory")


def test_links_between_two_gpus(tmp_path: Path) -> None:
    recorded = record("workstation")
    for gpu, other in ((0, 1), (1, 0)):
        recorded["gpus"][gpu]["links"] = [{"remote": recorded["gpus"][other]["bus"], "type": 0}] * 4
    recorded["pairs"][0]["p2p"] = 0
    topology = read(recorded, tmp_path)
    assert list(topology_lines(topology, ()))[-1] == "GPUs 0-1: 4 NVLinks, P2P"
    assert not list(topology_hints(topology))


def test_one_gpu_of_a_virtual_machine(tmp_path: Path) -> None:
    topology = read(record("single-h200"), tmp_path)
    assert list(topology_lines(topology, ())) == ["GPU driver 580.159.03, for CUDA 13.0 and older",
                                                  "GPU 0: NVIDIA H200; 140 GiB; 0000:00:07.0; PCIe 5 x16"]


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = gpu_topology.gpu_topology()
    assert missing["missing"].startswith("needs nvidia-ml-py: pip install nvidia-ml-py")
    failing = RecordedNvml({**record("single-h200"), "fails": "Driver Not Loaded"})
    monkeypatch.setitem(sys.modules, "pynvml", failing)
    assert gpu_topology.gpu_topology() == {"missing": "NVML: Driver Not Loaded"}
    told = text({**found(a={**HOST, "gpus": ["0, H200"], "topology": missing}), "problems": []})
    assert f"    GPU topology: {missing['missing']}" in told
    assert not any("topology" in line for line in text({**found(a={**HOST, "topology": missing}), "problems": []}))


def test_the_doctor_tells_it_and_what_does_not_fit(tmp_path: Path) -> None:
    host = copy.deepcopy(HOST)
    host["build"]["planes"]["nccl"]["missing"] = ""
    host["build"]["installed"] |= {"NCCL (nvidia-nccl-cu13)": "2.28.9", "CUDA (nvidia-cuda-runtime)": "13.0.96"}
    host |= {"gpus": ["0, NVIDIA RTX A6000"], "topology": read(record("workstation"), tmp_path), "bandwidth": [],
             "bandwidth_problem": "cudaErrorInsufficientDriver"}
    other = copy.deepcopy(host)
    other["build"]["installed"]["NCCL (nvidia-nccl-cu13)"] = "2.30.7"
    told = list(problems(found(a=host, b=other)))
    assert ("host a: the driver 535.183.01 is for CUDA 12.2, and nvidia-cuda-runtime 13.0.96 needs a newer one: update the "
            "driver, or install the packages for CUDA 12") in told
    assert "host a: copies between GPUs were not measured: cudaErrorInsufficientDriver" in told
    assert "NCCL (nvidia-nccl-cu13) differs: 2.28.9 on a, 2.30.7 on b" in told
    assert any("do not access each other's memory" in hint for hint in hints(host))
    assert any(line.startswith("    GPUs 0-1: PCIe") for line in text({**found(a=host), "problems": []}))


class CudaRuntime:
    """Stands for `cupy.cuda.runtime`: GPUs of which every two copy 64 MiB in a millisecond."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, count: int) -> None:
        self.count, self.device, self.clock = count, 0, 0.0
        self.memory: dict[int, int] = {}
        self.events: dict[int, float] = {}
        self.enabled: set[tuple[int, int]] = set()

    def getDeviceCount(self) -> int:
        return self.count

    def setDevice(self, device: int) -> None:
        self.device = device

    def deviceGetPCIBusId(self, device: int) -> str:
        return f"0000:{device + 0xA0:X}:00.0"

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return 1

    def deviceEnablePeerAccess(self, peer: int) -> None:
        if (self.device, peer) in self.enabled:
            raise self.CUDARuntimeError
        self.enabled.add((self.device, peer))

    def malloc(self, nbytes: int) -> int:
        self.memory[pointer := len(self.memory) + 1] = self.device
        return pointer

    def free(self, pointer: int) -> None:
        assert self.memory.pop(pointer) == self.device

    def eventCreate(self) -> int:
        self.events[event := len(self.events) + 100] = 0.0
        return event

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def eventRecord(self, event: int, stream: int) -> None:
        self.events[event] = self.clock

    def eventSynchronize(self, event: int) -> None:
        pass

    def eventElapsedTime(self, begin: int, end: int) -> float:
        return self.events[end] - self.events[begin]

    def memcpyPeerAsync(self, target: int, to: int, source: int, of: int, nbytes: int, stream: int) -> None:
        assert self.memory[target] == to and self.memory[source] == of == self.device
        self.clock += nbytes / (64 << 20)


def test_bandwidth_between_every_two_gpus() -> None:
    runtime = CudaRuntime(3)
    measured = measure(runtime)
    assert [each["gpus"] for each in measured] == [["0000:a0:00.0", "0000:a1:00.0"], ["0000:a0:00.0", "0000:a2:00.0"],
                                                   ["0000:a1:00.0", "0000:a2:00.0"]]
    assert {each["bytes_per_second"] for each in measured} == {(64 << 20) / 1e-3}
    assert not runtime.memory and not runtime.events and len(runtime.enabled) == 6


def test_without_cuda_the_measurement_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said = types.SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nLaunchError: CuPy is not installed\n")
    monkeypatch.setattr(host_probe.subprocess, "run", lambda *arguments, **options: said)
    assert host_probe.gpu_bandwidths({}) == ([], "LaunchError: CuPy is not installed")
