"""Turn recorded figures into tables and plots."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def write(results: Path) -> None:
    """Write README.md and the PNG plots beside the JSON files of a run; plots need matplotlib."""
    recorded = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))}
    machine = next(each["machine"] for each in recorded.values() if "machine" in each)
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    text = ["# Results", "", f"Written by `python -m benchmarks.run` on {machine['date']}. {machine['cpu']}, "
            f"{machine['cores']} cores, {machine['system']}, Python {machine['python']}, {versions}"
            + (f", {machine['gpu']}" if machine["gpu"] else "") + ".", "",
            "Medians of interleaved rounds in one run; ratios below 1 mean hvdlite is faster. Ranks are not bound to "
            "cores. What falls short, why, and which figures are still from bound ranks: [notes](NOTES.md)."]
    for name, each in recorded.items():
        kind, _, ranks = name.rpartition("-")
        if kind not in _TABLES:
            continue  # the page of another benchmark
        text += ["", *_TABLES[kind](each["rows"], int(ranks))]
    (results / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    try:
        _plot(recorded, results)
    except ImportError:
        print("no plots: pip install matplotlib")


def _table(head: list[str], body: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in body)]


def _size(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B"


def _compared(rows: Rows, label: str, scale: float, unit: str) -> list[str]:
    """Return a table of seconds, with hvdlite's ratio to each peer."""
    names: list[str] = []
    for row in rows:
        names += [name for name in row["seconds"] if name not in names]
    peers = [name for name in names if name != "hvdlite"]
    body = []
    for row in rows:
        seconds = row["seconds"]
        what = _size(row["bytes"]) if "bytes" in row else row["case"]
        body.append([what, *(f"{seconds[name] * scale:.1f}" if name in seconds else "" for name in names),
                     *(f"**{seconds['hvdlite'] / seconds[name]:.2f}**" if name in seconds else "" for name in peers)])
    return _table([label, *(f"{name}, {unit}" for name in names), *(f"ratio to {name}" for name in peers)], body)


def _collectives(rows: Rows, ranks: int) -> list[str]:
    return [f"## Allreduce of one private float32 tensor, in place, {ranks} ranks", "",
            f"![plot](collectives-{ranks}.png)", "", *_compared(rows, "size", 1e6, "us")]


def _latency(rows: Rows, ranks: int) -> list[str]:
    body = []
    for row in rows:
        ours, theirs = row["seconds"]["hvdlite"], row["seconds"]["gloo"]
        body.append([_size(row["bytes"]), str(row["hogs"])] + [
            cell for kind in ("median", "p99") for cell in (f"{ours[kind] * 1e6:.0f}", f"{theirs[kind] * 1e6:.0f}",
                                                           f"**{ours[kind] / theirs[kind]:.2f}**")])
    return [f"## A blocking allreduce, call by call, {ranks} ranks", "", *_table(
        ["size", "CPU hogs", "median, us", "gloo, us", "ratio", "p99, us", "gloo, us", "ratio"], body)]


def _gradients(rows: Rows, ranks: int) -> list[str]:
    return [f"## The 161 gradients of a ResNet-50, 102 MB, {ranks} ranks", "", *_compared(rows, "path", 1e3, "ms")]


def _jax_gradients(rows: Rows, ranks: int) -> list[str]:
    return [f"## The same gradients inside a function that JAX compiles, {ranks} ranks", "",
            *_compared(rows, "path", 1e3, "ms")]


def _small_gradients(rows: Rows, ranks: int) -> list[str]:
    return [f"## A training step over many small gradients, {ranks} ranks", "",
            "The ceiling is the same ranks without communication.", "", *_compared(rows, "parameters", 1e3, "ms")]


def _hooks(rows: Rows, ranks: int) -> list[str]:
    names = list(rows[0]["seconds"])
    body = [[row["model"], *(f"{row['seconds'][name] * 1e3:.2f}" for name in names)] for row in rows]
    return [f"## Communication hooks and compression, ms of a training step, {ranks} ranks", "",
            *_table(["model", *names], body)]


def _ledger(rows: Rows, ranks: int) -> list[str]:
    ratios = [[row["model"], f"{row['step'] * 1e3:.2f}", f"**{row['ratio']:.4f}**"] for row in rows if "model" in row]
    calls = [[row["call"], f"{row['cpu_seconds'] * 1e6:.2f}"] for row in rows if "call" in row]
    return [f"## What the ledgers cost, {ranks} ranks", "",
            *_table(["model", "a step, ms", "ratio with the ledger"], ratios), "", *_table(["call", "CPU time, us"], calls)]


def _batch_norm(rows: Rows, ranks: int) -> list[str]:
    return [f"## Batch normalization over {ranks} ranks, forward and backward, beside torch's own without other ranks", "",
            *_compared(rows, "input", 1e3, "ms")]


def _training(rows: Rows, ranks: int) -> list[str]:
    title = "Overhead of wrapping the optimizer, 1 rank" if ranks == 1 else f"Training on Fashion-MNIST, {ranks} ranks"
    body = []
    for row in rows:
        speed = row["images_per_second"]
        others = [f"{speed['hvdlite'] / speed[name]:.2f}" for name in ("ddp", "horovod") if name in speed]
        ceilings = [f"{speed['hvdlite'] / speed[name]:.3f}" for name in ("ceiling", "in step") if name in speed]
        body.append([row["model"], *(f"{value:.0f}" for value in speed.values()),
                     *(f"**{ratio}**" for ratio in ceilings + others)])
    names = list(rows[0]["images_per_second"])
    return [f"## {title}", "", "Images per second. The ceiling is the same ranks without communication, \"in step\" is that "
            "with an ideal barrier a step.", "",
            *_table(["model", *names, *(f"hvdlite / {name}" for name in ("ceiling", "in step", "ddp", "horovod")
                                        if name in names)], body)]


def _keras(rows: Rows, ranks: int) -> list[str]:
    (row,) = rows
    speed, used = row["images_per_second"], row["cpu_milliseconds_of_a_step"]
    peers = {"fit": ("fit ceiling", "one process", "ddp"), "tape": ("tape ceiling",), "ddp": ("loop ceiling",)}
    body = [[who, f"{speed[who]:.0f}", f"{used[who]:.1f}",
             ", ".join(f"**{speed[who] / speed[peer]:.3f}** of {peer}" for peer in peers.get(who, ()) if peer in speed)]
            for who in speed]
    return [f"## Keras on {row['backend']}: the example's CNN, {ranks} ranks", "",
            "Images per second of all ranks. The ceilings are the same ranks without communication; one process is rank 0 "
            "alone.", "", *_table(["contender", "images/s", "ms of CPU time a step", "speed"], body)]


def _idle(rows: Rows, ranks: int) -> list[str]:
    return [f"## Idle job, {ranks} ranks", "", f"{rows[0]['cpu_seconds_per_minute']:.4f} s of CPU a minute, over all ranks."]


def _control_scale(rows: Rows, ranks: int) -> list[str]:
    text = ["## The control plane at scale (simulated: real controllers, leaders and coordinator, no sockets)", "",
            "CPU time and messages of one training step in steady state.", "", "![plot](control_scale-1.png)"]
    for sweep in dict.fromkeys(row["sweep"] for row in rows):
        body = [[str(row["hosts"]), str(row["ranks"]), str(row["tensors"]), str(row["buckets"]),
                 f"{row['coordinator_s'] * 1e3:.2f}", f"{row['per_leader_s'] * 1e6:.0f}", f"{row['per_rank_s'] * 1e6:.0f}",
                 str(row["messages"]["to the coordinator"]), f"{row['learning_coordinator_s']:.2f}"]
                for row in rows if row["sweep"] == sweep]
        text += ["", f"By {sweep}:", "", *_table(
            ["hosts", "ranks", "tensors", "buckets", "coordinator, ms", "a leader, us", "a rank, us", "messages in",
             "learning, once, s"], body)]
    return text


def _planes(rows: Rows, ranks: int, under: str = "MPICH") -> list[str]:
    text = [f"## Planes beside the libraries they stand on, {ranks} ranks, {under}"]
    for case in dict.fromkeys(row["case"] for row in rows):
        named = [{"bytes": row["bytes"], "seconds": row["seconds"]} for row in rows if row["case"] == case]
        text += ["", f"### {case}", "", *_compared(named, "size", 1e6, "us")]
    return text


def _torch_distributed(rows: Rows, ranks: int) -> list[str]:
    (parameters, *measured) = rows
    steps = [{"case": row["part"], "seconds": row["seconds"]} for row in measured if "bytes" not in row]
    text = [f"## torch.distributed with the backend hvdlite, {ranks} ranks", "",
            f"After {parameters['steps']} steps of an MLP under DDP, parameters differ from those with Gloo by "
            f"{parameters['from_gloo']:.1g} at most, and not between ranks.", ""]
    text += _compared(steps, "work", 1e3, "ms") if steps else []
    for part in dict.fromkeys(row["part"] for row in measured if "bytes" in row):
        named = [{"bytes": row["bytes"], "seconds": row["seconds"]} for row in measured if row["part"] == part]
        text += ["", f"### {part}: medians of single calls", "", *_compared(named, "size", 1e6, "us")]
    return text


def _sharded(rows: Rows, ranks: int) -> list[str]:
    body = [[row["optimizer"], f"{row['bytes'] / 2**20:.0f}", f"**{row['bytes'] / rows[0]['bytes']:.2f}**",
             *(text for kind in ("step_seconds", "whole_seconds")
               for text in (f"{row[kind] * 1e3:.1f}", f"**{row[kind] / rows[0][kind]:.2f}**"))] for row in rows]
    return [f"## Sharded optimizer state: AdamW, 22.6 million parameters, {ranks} ranks", "",
            "Memory is that of all ranks, above what they had before. Ratios are to the whole state on each rank.", "",
            *_table(["optimizer", "MiB", "ratio", "step(), ms", "ratio", "a step, ms", "ratio"], body)]


def _two_hosts(rows: Rows, ranks: int) -> list[str]:
    plane = rows[0]["case"].partition(", ")[2]
    return [f"## Two hosts of {ranks // 2} ranks: the whole way by {plane}, beside the bare libraries", "",
            *_compared(rows, "size", 1e6, "us")]


_TABLES = {"planes": _planes, "planes_openmpi": functools.partial(_planes, under="Open MPI"), "collectives": _collectives,
           "latency": _latency,
           "gradients": _gradients, "jax_gradients": _jax_gradients,
           "small_gradients": _small_gradients, "batch_norm": _batch_norm, "training": _training,
           "hooks": _hooks, "idle": _idle, "ledger": _ledger, "torch_distributed": _torch_distributed,
           "torch_distributed_blocking": _torch_distributed,
           **{f"keras_{backend}": _keras for backend in ("tensorflow", "torch", "jax")},
           "control_scale": _control_scale, "sharded": _sharded,
           **{f"two_hosts_{engine}_{plane}": _two_hosts for engine in ("mpi", "gloo") for plane in (engine, "hierarchical")}}


_LABELS = {"gloo": "Gloo", "mpi": "MPICH", "ceiling": "no communication", "in step": "a barrier each step, no gradients",
           "hvdlite, step": 'hvdlite, wait_in="step"', "ddp": "torch DDP on Gloo", "horovod": "Horovod"}
"""What plots call those that were measured, where tables are shorter."""
_MODELS = {"cnn": "CNN, 0.4 M\nparameters", "mlp": "MLP, 5.8 M\nparameters", "2000 parameters": "2,000 small\nparameters"}


def _plot(recorded: dict[str, Any], results: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    for name, each in recorded.items():
        figure, axes = pyplot.subplots(figsize=(6, 4.6))
        if name.startswith("collectives"):
            for who in each["rows"][0]["seconds"]:
                axes.loglog([row["bytes"] for row in each["rows"]], [row["seconds"][who] * 1e6 for row in each["rows"]],
                            marker="o", label=_LABELS.get(who, who))
            axes.set_xlabel("bytes of the tensor")
            axes.set_ylabel("microseconds")
            axes.set_title(f"time of an allreduce in place on {each['ranks']} ranks: lower is better")
        elif name.startswith("control_scale"):
            sweep = each["rows"][0]["sweep"]
            rows = [row for row in each["rows"] if row["sweep"] == sweep]
            for key, label in (("coordinator_s", "coordinator"), ("per_leader_s", "a leader"), ("per_rank_s", "a rank")):
                axes.loglog([row["ranks"] for row in rows], [row[key] * 1e3 for row in rows], marker="o", label=label)
            axes.set_xlabel("ranks, 8 a host")
            axes.set_ylabel("CPU ms per training step")
            axes.set_title("control plane, 161 tensors in 5 buckets")
        elif name.startswith("training") and each["ranks"] > 1:
            names = list(each["rows"][0]["images_per_second"])
            for index, who in enumerate(names):
                shares = [row["images_per_second"][who] / row["images_per_second"]["ceiling"] for row in each["rows"]]
                axes.bar([place + index / (len(names) + 1) for place in range(len(shares))], shares,
                         width=1 / (len(names) + 1), label=_LABELS.get(who, who))
            axes.set_xticks([place + (len(names) - 1) / 2 / (len(names) + 1) for place in range(len(each["rows"]))],
                            [_MODELS.get(row["model"], row["model"]) for row in each["rows"]])
            axes.set_ylabel("images/s, relative to no communication")
            axes.set_title(f"training on {each['ranks']} ranks: higher is better")
        else:
            pyplot.close(figure)
            continue
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2, frameon=False, fontsize="small")
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(results / f"{name}.png", dpi=130, bbox_inches="tight")
        pyplot.close(figure)
