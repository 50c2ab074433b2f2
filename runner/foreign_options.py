"""The options of horovodrun, torchrun and mpirun that hvdrun does not have by the same name."""

from __future__ import annotations

from typing import Final

HOROVOD_FLAGS: Final = {
    "fusion-threshold-mb": ("fusion_threshold", "MB"), "timeline-filename": ("timeline", "FILE"),
    "stall-check-warning-time-seconds": ("stall_check_time_seconds", "S"),
    "no-stall-check": ("stall_check_time_seconds", ""),
    "stall-check-shutdown-time-seconds": ("stall_shutdown_time_seconds", "S"),
    "autotune-bayes-opt-max-samples": ("autotune_max_samples", "N"), "gloo-timeout-seconds": ("gloo_timeout", "S"),
}
"""Horovod's flags for knobs that have other names here."""
_PLANE: Final = "the plane chooses the algorithm"
MEANINGLESS_FLAGS: Final = {
    "cycle-time-ms": ("MS", "hvdlite does not work in cycles"),
    "cache-capacity": ("N", "hvdlite has no response cache"),
    "hierarchical-allreduce": ("", _PLANE), "no-hierarchical-allreduce": ("", _PLANE),
    "hierarchical-allgather": ("", _PLANE), "no-hierarchical-allgather": ("", _PLANE),
    "torus-allreduce": ("", _PLANE), "no-torus-allreduce": ("", _PLANE),
    "stall-check": ("", "the stall check is on by default"), "disable-cache": ("", "nothing is cached between jobs"),
    "num-nccl-streams": ("N", "NCCL needs one stream"),
    "autotune-gaussian-process-noise": ("X", "autotune has no such process"),
    "mpi-threads-disable": ("", "only one thread calls MPI"), "no-mpi-threads-disable": ("", "this is the default"),
    "thread-affinity": ("CORE", "use --bind"),
    "log-with-timestamp": ("", "this is the default"), "no-log-hide-timestamp": ("", "this is the default"),
    "log-without-timestamp": ("", "use --log-hide-time"), "log-hide-timestamp": ("", "use --log-hide-time"),
    "tcp": ("", "it applies to Spectrum MPI only"), "jsrun": ("", "start the script with jsrun instead of hvdrun"),
}
"""Horovod's flags that are accepted without effect, with the reason."""
_BY_HOSTS: Final = "give all hosts with -H a:4,b:4, and start hvdrun on one of them"
OTHER_LAUNCHERS: Final = {
    "nnodes": _BY_HOSTS, "node-rank": _BY_HOSTS, "standalone": "not needed: leave it out", "rdzv-backend": _BY_HOSTS,
    "rdzv-endpoint": _BY_HOSTS, "master-addr": "not needed: rank 0 runs on the first host",
    "master-port": "not needed: a free port is found; --coordinator-port names one",
    "mca": "--mpi --mpi-args='-mca NAME VALUE' passes it to mpirun", "map-by": "-H a:4,b:4 is filled in order",
    "bind-to": "use --bind", "oversubscribe": "not needed: leave it out", "allow-run-as-root": "not needed: leave it out",
}
"""What to write instead of options of torchrun and mpirun, by names without leading dashes and with - for _."""
