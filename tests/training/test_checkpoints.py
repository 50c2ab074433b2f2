"""Durable checkpoints: structures, files, and what ranks as threads write and read (docs/protocol.md#checkpoints)."""

from __future__ import annotations

import collections
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.core.array import BFLOAT16
from hvdlite.core.errors import CheckpointError, UnsupportedError
from hvdlite.runtime.runtime import Runtime
from hvdlite.training.checkpoints import directory as disk
from hvdlite.training.checkpoints import load, save
from hvdlite.training.checkpoints.loading import read
from hvdlite.training.checkpoints.ranks import Ranks
from hvdlite.training.checkpoints.saving import write
from hvdlite.training.checkpoints.structure import put_together, taken_apart
from tests.worlds import threads

_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3),
                    st.binary(max_size=3), st.complex_numbers(allow_nan=False))
_KEYS = st.one_of(st.text(max_size=2), st.integers(0, 3), st.just("!"), st.tuples(st.integers(0, 3)))
_STRUCTURES = st.recursive(_LEAVES, lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=12)


@given(_STRUCTURES)
def test_a_structure_comes_back_as_it_was(structure: Any) -> None:
    arrays: dict[str, Any] = {}
    skeleton = taken_apart("x", structure, arrays)
    assert repr(put_together(skeleton, arrays)) == repr(structure)


def test_arrays_keep_dtype_and_shape_and_classes_that_are_no_plain_data_are_refused() -> None:
    given_values = {"a.b": np.arange(6).reshape(2, 3), "a": {"b": np.float32(2)}, "zero": np.array(3.5), "nan": float("nan"),
                    "set": {3}, "counter": collections.Counter("aab"), "inf": -float("inf"), "bytes": b"x"}
    arrays: dict[str, Any] = {}
    made = put_together(taken_apart("x", given_values, arrays), arrays)
    assert repr(made) == repr(given_values) and made["a.b"].dtype == given_values["a.b"].dtype  # type: ignore[union-attr]
    for value, where in ((object(), "'x'"), ({"k": [1, print]}, "'x.k.1'"), (np.array([None]), "'x'")):
        with pytest.raises(UnsupportedError, match=f"{where} cannot be saved: it is a "):
            taken_apart("x", value, {})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnsupportedError, match="contains itself"):
        taken_apart("x", endless, {})


def saved(runtime: Runtime, folders: Sequence[Path], step: int) -> Path:
    """Write a checkpoint with two shared tensors, one that differs, and one that only rank 1 has."""
    rank = runtime.world.rank
    arrays = {"model.w": np.full((3, 4), step, np.float32), "model.b": np.full(5, step).astype(BFLOAT16),
              "own": np.array([rank, step], np.complex128), **({"one": np.ones(1)} if rank == 1 else {})}
    parts = {"model": {"step": step}, "mine": [rank], **({"only": "rank 1's"} if rank == 1 else {})}
    return write(Ranks(runtime, "save"), folders[rank], parts, arrays)


def loaded(runtime: Runtime, folders: Sequence[Path]) -> tuple[int, list[int]]:
    """Return the step of the checkpoint that all read, and whose own parts this rank has got."""
    found = read(Ranks(runtime, "load"), folders[runtime.world.rank])
    assert found is not None
    parts, arrays, _ = found
    step, mine = parts["model"]["step"], parts["mine"]
    assert arrays["model.w"].tolist() == np.full((3, 4), step).tolist() and arrays["model.b"].dtype == BFLOAT16
    assert arrays["own"].tolist() == [mine[0], step] and arrays["own"].dtype == np.complex128
    assert ("one" in arrays) == (mine == [1]) == (parts.get("only") == "rank 1's")
    return step, mine


def _folders(tmp_path: Path, names: str) -> list[Path]:
    return [tmp_path / name for name in names]


@pytest.mark.parametrize("names", ["aaaa", "aabb", "abcd", "abab"])
def test_ranks_write_once_a_directory_and_keep_the_newest_two(tmp_path: Path, names: str) -> None:
    folders = _folders(tmp_path, names)
    for step in range(4):
        threads(4, saved, folders, step)
    for folder in set(folders):
        assert sorted(os.listdir(folder)) == ["checkpoint-000003", "checkpoint-000004"]
        manifest, _ = disk.checkpoints(folder)[0]
        tensors = [tensor for file in manifest.files.values() for tensor in file]
        assert tensors.count("model.w") == tensors.count("model.b") == 1
        assert tensors.count("own") == names.count(folder.name), "its own ranks'"
    assert threads(4, loaded, folders) == [(3, [rank]) for rank in range(4)]


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("names", ["aaaa", "aabb"])
def test_another_number_of_ranks_loads_it(tmp_path: Path, names: str, size: int) -> None:
    folders = _folders(tmp_path, names)
    threads(4, saved, folders, 1)
    assert threads(size, loaded, (folders * 2)[:size]) == [(1, [rank % 4]) for rank in range(size)]


def test_a_host_that_lacks_it_receives_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = _folders(tmp_path, "aabb")
    threads(4, saved, folders, 1)
    shutil.rmtree(folders[2])
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert threads(4, loaded, folders) == [(1, [0]), (1, [1]), (1, [0]), (1, [1])]
    assert "what rank 2 had for itself (statistics, random states) is not there" in caplog.text
    folders = _folders(tmp_path, "dddd")
    threads(4, saved, folders, 2)
    assert threads(4, loaded, _folders(tmp_path, "dede")) == [(2, [rank]) for rank in range(4)]


def test_a_host_that_has_come_later_does_not_count_from_the_beginning(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        threads(2, saved, _folders(tmp_path, "aa"), step)
    threads(2, saved, _folders(tmp_path, "ba"), 4)
    assert os.listdir(tmp_path / "b") == ["checkpoint-000004"]
    assert sorted(os.listdir(tmp_path / "a")) == ["checkpoint-000003", "checkpoint-000004"]
    assert threads(2, loaded, _folders(tmp_path, "ba")) == [(4, [0]), (4, [1])]


def _damages(path: Path) -> Mapping[str, Any]:
    return {"a bit": lambda: _change(path, lambda text: text[:-1] + bytes([text[-1] ^ 1])), "its end": lambda: _change(
        path, lambda text: text[:len(text) // 2]), "all of it": lambda: _change(path, lambda text: b""), "it": path.unlink}


def _change(path: Path, changed: Any) -> None:
    path.write_bytes(changed(path.read_bytes()))


@pytest.mark.parametrize("file", ["manifest.json", "shared-00000.safetensors", "rank-00001.safetensors"])
@pytest.mark.parametrize("what", ["a bit", "its end", "all of it", "it"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str,
                                                       what: str) -> None:
    folders = _folders(tmp_path, "aa")
    for step in (1, 2):
        threads(2, saved, folders, step)
    _damages(tmp_path / "a/checkpoint-000002" / file)[what]()
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert threads(2, loaded, folders) == [(1, [0]), (1, [1])]
    assert len(caplog.records) == 1 and "checkpoint-000002: " in caplog.text and file in caplog.text, caplog.text
    threads(2, saved, folders, 3)
    for path in (tmp_path / "a").glob("checkpoint-*[13]"):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"there is no whole checkpoint in .*a: .*checkpoint-000002: .*begin anew"):
        threads(2, loaded, folders)


def test_a_rank_that_cannot_write_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = _folders(tmp_path, "aa")
    threads(2, saved, folders, 1)
    whole = disk.write

    def full(path: Path, file: str, *rest: Any) -> Any:
        if file == "rank-00001.safetensors":
            raise OSError(28, "No space left on device")
        return whole(path, file, *rest)
    monkeypatch.setattr(disk, "write", full)
    with pytest.raises(CheckpointError, match=r"was written to .*a: rank 1: OSError: .*No space left on device"):
        threads(2, saved, folders, 2)
    assert os.listdir(tmp_path / "a") == ["checkpoint-000001"]
    assert threads(2, loaded, folders) == [(1, [0]), (1, [1])]


def test_what_an_interrupted_save_has_left_does_not_count_and_goes_with_the_next(tmp_path: Path) -> None:
    torn = disk.temporary(tmp_path, 1, "other")
    disk.begin(torn, 0)
    disk.write(torn, "shared-00000.safetensors", {"x": np.ones(3)}, {"x": 0})
    assert load(tmp_path) is None
    save(tmp_path, x=1)
    assert os.listdir(tmp_path) == ["checkpoint-000001"] and load(tmp_path) == {"x": 1}


class Counter:
    """Has a state dict."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set it."""
        self.count = state["count"]


def test_arrays_and_objects_load_in_place_and_random_numbers_go_on(tmp_path: Path) -> None:
    array, counter = np.arange(3.0), Counter()
    counter.count = 7
    save(tmp_path, blocking=False, array=array, counter=counter, plain={"a": 1})
    drawn = np.random.rand(3)
    array += 1
    counter.count = 0
    assert load(tmp_path, array=array, counter=counter) == {"plain": {"a": 1}}
    assert array.tolist() == [0.0, 1.0, 2.0] and counter.count == 7 and np.random.rand(3).tolist() == drawn.tolist()
    assert load(tmp_path)["counter"] == {"count": 7}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="'nobody' is not in the checkpoint, which has array, counter, plain"):
        load(tmp_path, nobody=counter)
    with pytest.raises(CheckpointError, match=r"nothing was loaded: rank 0: ValueError: 'array' is not what was saved: it "
                                              r"is float32 \[4\] here, and float64 \[3\] in the checkpoint"):
        load(tmp_path, counter=counter, array=np.zeros(4, np.float32))


def test_an_error_in_the_background_is_raised_by_wait_and_logged_by_the_next(tmp_path: Path,
                                                                            caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    saving = save(tmp_path / "file/below", blocking=False, x=1)
    with pytest.raises(CheckpointError, match=r"no checkpoint was written to .*below: rank 0: NotADirectoryError"):
        saving.wait()
    save(tmp_path / "a", x=1)
    assert "a checkpoint was not written: CheckpointError" in caplog.text
    with pytest.raises(CheckpointError, match="UnsupportedError: 'x' cannot be saved"):
        save(tmp_path / "a", x=object())
