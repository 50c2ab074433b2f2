"""The ledger of a rank: for what the thread that trains has used its time."""

from __future__ import annotations

import msgspec


class Ledger(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of the thread that trains, over some steps; a part may overlap with `cpu`.

    Attributes:
        seconds: in all.
        steps: of the optimizer, or as the script counts them.
        blocked: waiting for collectives.
        cpu: running.
        queued: able to run, while something else ran on its core.
        collecting: in Python's garbage collection.
        input: waiting for batches, as far as the frontend can tell.
        input_cpu: of those, running.
        absent: gradients that this rank did not have in a step, counted by step.
        forward: in modules, without waits for collectives; like the following only under `hvdrun --profile`, with torch.
        backward: from there to the optimizer's step, without waits.
        optimizer: in the optimizer's step, without waits.
    """

    seconds: float = 0.0
    steps: int = 0
    blocked: float = 0.0
    cpu: float = 0.0
    queued: float = 0.0
    collecting: float = 0.0
    input: float = 0.0
    input_cpu: float = 0.0
    absent: int = 0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0

    def since(self, earlier: Ledger) -> Ledger:
        """Return what has been added."""
        return Ledger(*(now - before for now, before in
                        zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)))
