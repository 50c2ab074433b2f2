"""What the checks of `gpu_check` share: the sheet they write figures on, and the GPU they use."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ.get("HVDLITE_RANK", 0)), int(os.environ.get("HVDLITE_SIZE", 1))


class Sheet:
    """The figures of one check, written at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.record: dict[str, Any] = {"figures": [], "notes": {}, "errors": {}}

    def add(self, name: str, value: float | int | str, unit: str = "") -> None:
        self.record["figures"].append({"name": name, "value": value, "unit": unit})
        self.write()

    def note(self, name: str, text: Any) -> None:
        self.record["notes"][name] = text
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.record, default=str), encoding="utf-8")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record what goes wrong inside, and go on."""
        try:
            yield
        except Exception:
            self.record["errors"][name] = traceback.format_exc()
            print(f"{name}: {self.record['errors'][name]}", flush=True)
            self.write()


def one_gpu_each() -> Any:
    """Choose this rank's GPU; several ranks on one are hosts of their own to NCCL, which then speaks TCP."""
    import torch
    gpus = torch.cuda.device_count()
    if not gpus:
        raise RuntimeError(f"torch {torch.__version__} sees no GPU")
    if gpus < SIZE:
        os.environ.update(NCCL_HOSTID=f"r{RANK}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_ALGO="Ring",
                          NCCL_PROTO="Simple", NCCL_MAX_CTAS="2", HVDLITE_SHARED_GPU="1")
    torch.cuda.set_device(RANK % gpus)
    return torch.device("cuda", torch.cuda.current_device())


def share_even_alone() -> None:
    """Let a job of one rank go all the way, as if there were others."""
    from hvdlite.training.gradient_reducer import GradientReducer
    real = GradientReducer.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        self.is_shared = True
    GradientReducer.__init__ = init  # type: ignore[method-assign]
