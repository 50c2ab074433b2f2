"""The control plane at scale, in one process: real controllers, host leaders and coordinator, no sockets.

Each figure is the CPU time and the number of messages of one training step in steady state: every rank reports every
bucket of a model, the coordinator releases each, every rank applies the decisions. Messages are encoded and decoded as on
the wire. The coordinator's cost must grow with hosts x buckets, not with ranks x tensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import machine, median
from hvdlite.core.config import Config
from hvdlite.core.types import Collective
from hvdlite.negotiation.controller import Controller
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.layouts import BucketSizes
from hvdlite.negotiation.leader import Leader
from hvdlite.negotiation.messages import BucketReady, Decision, HostReport, Layout, Request, RoundDone
from hvdlite.negotiation.negotiator import Policy

_encode = msgspec.msgpack.Encoder().encode
_host_reports = msgspec.msgpack.Decoder(HostReport)
_decisions = msgspec.msgpack.Decoder(Decision)
LABEL = "gradients"


class Cluster:
    """`hosts` hosts with `per_host` ranks, training a model of `tensors` gradients in about `buckets` buckets."""

    def __init__(self, hosts: int, per_host: int, tensors: int, buckets: int) -> None:
        size = hosts * per_host
        bucket_bytes = -(-tensors // buckets) * 4096
        self.coordinator = Coordinator(size, Policy(Config().fusion_threshold, BucketSizes(bucket_bytes, bucket_bytes)))
        self.controllers = [Controller(rank) for rank in range(size)]
        self.leaders = [Leader(range(host * per_host, (host + 1) * per_host), size) for host in range(hosts)]
        self.tensors = tensors
        self.seconds = {"coordinator": 0.0, "leaders": 0.0, "controllers": 0.0}
        self.messages = {"to the coordinator": 0, "from the coordinator": 0}
        self.layout = self._learn()

    def step(self) -> None:
        """Run one training step: bucket by bucket, as backward would."""
        self.number += 1
        for bucket in self.layout.buckets:
            ends_round = bucket is self.layout.buckets[-1]
            ready = BucketReady(bucket_id=bucket.bucket_id, round_id=self.number, ends_round=ends_round)
            for controller in self.controllers:
                controller.enqueue_bucket(bucket, ready)
            self.exchange()

    def exchange(self) -> list[Any]:
        """Carry everything that is to be said, and return what rank 0 is told to do."""
        clock = time.process_time
        start = clock()
        reports = [controller.report() for controller in self.controllers]
        middle = clock()
        self.seconds["controllers"] += middle - start
        sent = []
        for leader in self.leaders:
            for rank in leader.ranks:
                if reports[rank] is not None:
                    leader.receive(rank, reports[rank])
            merged = leader.take_report()
            if merged is not None:
                sent.append((leader.ranks, _encode(merged)))
        start = clock()
        self.seconds["leaders"] += start - middle
        for ranks, body in sent:
            self.coordinator.receive_host(ranks, _host_reports.decode(body), 0.0)
        decision = self.coordinator.decide()
        body = b"" if decision is None else _encode(decision)
        middle = clock()
        self.seconds["coordinator"] += middle - start
        self.messages["to the coordinator"] += len(sent)
        if decision is None:
            return []
        self.messages["from the coordinator"] += len(self.leaders)
        for leader in self.leaders:
            leader.observe(_decisions.decode(body))
        start = clock()
        self.seconds["leaders"] += start - middle
        told = [controller.apply(decision) for controller in self.controllers]
        self.seconds["controllers"] += clock() - start
        return told[0]

    def _learn(self) -> Layout:
        self.number = 1
        for index in range(self.tensors):
            request = Request(f"gradient.{index}", Collective.ALLREDUCE, "float32", (1024,), label=LABEL, round_id=1)
            for controller in self.controllers:
                controller.enqueue(request)
        for controller in self.controllers:
            controller.round_done(RoundDone(LABEL, 1))
        (layout,) = [told for told in self.exchange() if isinstance(told, Layout)]
        self.number = layout.first_round - 1
        return layout


def measure(hosts: int, per_host: int, tensors: int, buckets: int, rounds: int = 5) -> dict[str, Any]:
    """Return the cost of one step; times are medians in seconds over `rounds` steps, per role."""
    cluster = Cluster(hosts, per_host, tensors, buckets)
    learning = dict(cluster.seconds)
    samples: dict[str, list[float]] = {role: [] for role in cluster.seconds}
    gc.collect()
    gc.disable()
    for _ in range(rounds + 1):
        cluster.seconds = dict.fromkeys(cluster.seconds, 0.0)
        cluster.messages = dict.fromkeys(cluster.messages, 0)
        cluster.step()
        for role, spent in cluster.seconds.items():
            samples[role].append(spent)
    gc.enable()
    size = hosts * per_host
    seconds = {role: median(values[1:]) for role, values in samples.items()}
    return {"hosts": hosts, "ranks": size, "tensors": tensors, "buckets": len(cluster.layout.buckets),
            "coordinator_s": seconds["coordinator"], "per_leader_s": seconds["leaders"] / hosts,
            "per_rank_s": seconds["controllers"] / size, "messages": cluster.messages,
            "learning_coordinator_s": learning["coordinator"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    hosts = [1, 4, 16, 64] if arguments.short else [1, 4, 16, 64, 128, 256, 512]
    sweeps = {
        "hosts (8 ranks each, 161 tensors, 5 buckets)": [(count, 8, 161, 5) for count in hosts],
        "ranks per host (16 hosts, 161 tensors, 5 buckets)": [(16, count, 161, 5) for count in (1, 2, 4, 8, 16, 32)],
        "tensors (16 hosts, 8 ranks each, 5 buckets)": [(16, 8, count, 5) for count in (10, 50, 161, 500, 1000)],
        "buckets (16 hosts, 8 ranks each, 161 tensors)": [(16, 8, 161, count) for count in (1, 5, 10, 20, 40)],
    }
    rows = []
    for sweep, cases in sweeps.items():
        print(f"\nby {sweep}")
        for case in cases:
            row = {"sweep": sweep, **measure(*case)}
            rows.append(row)
            print(f"  {row['hosts']:4} hosts {row['ranks']:5} ranks {row['tensors']:5} tensors {row['buckets']:3} buckets:  "
                  f"coordinator {row['coordinator_s'] * 1e3:7.2f} ms  a leader {row['per_leader_s'] * 1e6:6.0f} us  "
                  f"a rank {row['per_rank_s'] * 1e6:5.0f} us  messages in {row['messages']['to the coordinator']:5}  "
                  f"learning {row['learning_coordinator_s']:6.2f} s", flush=True)
    if arguments.record:
        arguments.record.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
