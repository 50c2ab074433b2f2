"""The time in which a script waits for batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, IterableDataset, dataloader  # noqa: E402

from hvdlite.diagnostics.progress import Progress  # noqa: E402
from hvdlite_torch.step_parts import count_input  # noqa: E402


class Nested(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DataLoader([1, 2, 3]))


def test_a_loader_that_reads_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, waits = Progress(), []
    monkeypatch.setattr(progress, "loaded", lambda seconds, cpu: waits.append(seconds))
    api = SimpleNamespace(is_initialized=lambda: True, is_provisional=lambda: False,
                          runtime=lambda: SimpleNamespace(progress=progress))
    monkeypatch.setattr("hvdlite_torch.step_parts.api", api)
    monkeypatch.setattr(dataloader._BaseDataLoaderIter, "__next__", dataloader._BaseDataLoaderIter.__next__)
    count_input()
    count_input()
    assert len(list(DataLoader(Nested(), batch_size=None))) == 3
    assert len(waits) == 4, "and for the end"
