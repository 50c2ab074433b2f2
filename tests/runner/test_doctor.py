"""What the doctor makes of facts; that it sees real hosts is in test_hosts.py."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import socket
import subprocess
from typing import Any

from hvdlite.core.sockets import route_to
from hvdlite_runner.agents.host_probe import ProbeServer, interfaces, own_addresses, probe, speed
from hvdlite_runner.reports.doctor import exchange_seconds, hints, problems, text
from tests.worlds import HANGS_SECONDS, HVDRUN, ROOT

HOST: dict[str, Any] = {
    "topology": {"missing": "needs nvidia-ml-py"}, "bandwidth": [], "bandwidth_problem": "",
    "hostname": "a", "python": "3.11.2", "executable": "/py", "cores": 8,
    "interfaces": {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]},
    "ssh": "OpenSSH_9", "limits": {"memlock": -1, "files": 65536, "shm": 8 << 30}, "gpus": [], "infiniband": [],
    "launchers": {"srun": "/usr/bin/srun"}, "build_problem": "",
    "build": {"hvdlite": "0.1.0", "installed": {"PyTorch": "2.13.0"}, "environment": "none",
              "planes": {"shm": {"missing": ""}, "nccl": {"missing": "needs cupy: pip install 'hvdlite[nccl-cuda12]'"}}},
}


def found(**hosts: dict[str, Any]) -> dict[str, Any]:
    return {"scheduler": "Slurm", "hosts": hosts, "unreachable": [], "pairs": []}


def test_hosts_that_agree() -> None:
    facts = found(a=HOST, b=HOST)
    facts["pairs"] = [{"from": "b", "to": "a", "round_trip_seconds": 5e-5, "bytes_per_second": 1e9}]
    assert list(problems(facts)) == []
    lines = text({**facts, "problems": []})
    assert lines[:2] == ["no problem found", "inside an allocation of Slurm"]
    assert "    plane nccl: needs cupy: pip install 'hvdlite[nccl-cuda12]'" in lines
    assert "    b - a: round trip 50 us, 1,000 MB/s" in lines
    assert lines[-2].startswith("    ResNet-50, 102 MB of gradients: 0.1 s more in each step; faster than one host if ")
    facts["pairs"].append({"from": "c", "to": "a", "round_trip_seconds": 5e-5, "bytes_per_second": 117e6})
    facts["pairs"].append({"from": "c", "to": "b", "problem": "no route"})
    *_, last, head, resnet, gpt = text({**facts, "hosts": {"a": HOST, "b": HOST, "c": HOST}, "problems": []})
    assert "no route" in last and "what 3 hosts bring over one" in head
    assert "1.2 s more in each step; faster than one host if its step takes more than 0.58 s" in resnet
    assert "496 MB" in gpt and "docs/slow-links.md" in gpt


def test_the_page_on_slow_links_has_the_doctors_arithmetic() -> None:
    page, model = (ROOT / "docs/slow-links.md").read_text(encoding="utf-8"), ("", "")
    checked = 0
    for row in re.findall(r"^\| (.*) \| (\d+) ([MG])bit/s \| ([\d.]+) s \| ([\d.]+) \|", page, re.MULTILINE):
        head, rate, unit, step, share = row
        model = tuple(head.split(" | ")) if head.strip(" |") else model
        bandwidth = 0.94 * float(rate) * (1e9 if unit == "G" else 1e6) / 8
        millions, alone = float(re.findall(r"([\d,.]+) M", model[0])[0].replace(",", "")), float(model[1].split()[0])
        whole = alone + exchange_seconds(4e6 * millions, bandwidth, 2)
        assert abs(whole / float(step) - 1) < 0.06 and abs(alone / whole - float(share)) < 0.006, row
        checked += 1
    assert checked == 8


def test_hosts_that_do_not() -> None:
    other = copy.deepcopy(HOST)
    other["python"], other["build"]["installed"]["PyTorch"] = "3.12.1", "2.9.0"
    other["interfaces"] = {"lo": ["127.0.0.1"]}
    broken = {**HOST, "build": {}, "build_problem": "No module named numpy"}
    facts = {**found(a=HOST, b=other, c=broken), "unreachable": ["host d cannot be resolved"],
             "pairs": [{"from": "b", "to": "a", "problem": "10.0.0.1: no answer"}]}
    told = list(problems(facts))
    assert told[:3] == ["host d cannot be resolved", "host b does not reach host a: 10.0.0.1: no answer",
                        "host b has no network interface but the loopback"]
    assert "host c: hvdlite does not work: No module named numpy" in told
    assert "python differs: 3.11 on a, 3.12 on b, 3.11 on c" in told
    assert "PyTorch differs: 2.13.0 on a, 2.9.0 on b, none on c" in told


def test_gpus_that_are_not_used() -> None:
    (told,) = problems(found(a={**HOST, "gpus": ["0, H200"]}))
    assert told == "host a does not use its GPUs: needs cupy: pip install 'hvdlite[nccl-cuda12]'"
    without_torch = copy.deepcopy(HOST)
    without_torch["build"]["installed"] = {}
    assert not list(problems(found(a={**without_torch, "gpus": ["0, H200"]})))


def test_small_limits_where_they_matter() -> None:
    small = {**HOST, "limits": {"memlock": 1 << 16, "files": 256, "shm": 64 << 20}}
    assert [hint.split()[0] for hint in hints(small)] == ["files"]
    assert [hint.split()[0] for hint in hints({**small, "gpus": ["0, H200"], "infiniband": ["mlx5_0"]})] == [
        "files", "memlock", "shm"]


def test_this_host() -> None:
    ended = subprocess.run([*HVDRUN, "--doctor", "--json"], capture_output=True,
                           text=True, check=False, timeout=100)
    assert ended.returncode == 0, ended.stdout
    facts = json.loads(ended.stdout)["hosts"]["localhost"]
    assert facts["build"]["planes"]["shm"]["missing"] == "" and facts["limits"]["files"] and facts["cores"] >= 1
    assert facts["build"]["environment"].startswith("none")


def test_ways_to_a_port() -> None:
    assert "127.0.0.1" in interfaces()["lo"] and route_to("127.0.0.1") == "127.0.0.1"
    assert own_addresses(["127.0.0.1"], ["lo"]) and "127.0.0.1" not in own_addresses(["127.0.0.1"], [])
    assert own_addresses([], ["no-such-interface"]) == []
    probe_server = ProbeServer()
    try:
        assert probe(["127.0.0.1"], probe_server.port) == {"127.0.0.1": ""}
        seconds, bandwidth = speed(["127.0.0.1"], probe_server.port)
        assert 0 < seconds < 1 and bandwidth > 1e6
    finally:
        probe_server.close()
    assert probe(["127.0.0.1"], probe_server.port)["127.0.0.1"] == "connection refused"


def test_strangers_at_the_probe_server_give_way_to_the_next() -> None:
    with contextlib.closing(ProbeServer()) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(80)]
        assert probe(["127.0.0.1"], server.port) == {"127.0.0.1": ""}
        held[0].settimeout(HANGS_SECONDS)
        assert held[0].recv(1) == b""
        for sock in held:
            sock.close()
