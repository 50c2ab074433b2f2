"""`hvd.save` and `hvd.load` with PyTorch: training goes on bit by bit; ranks may be killed at any moment."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors", reason="checkpoints need the package safetensors")

import hvdlite_torch as hvd  # noqa: E402
from tests.torch.elastic_training import OPTIMIZERS, Training  # noqa: E402
from tests.torch.programs import checkpoints, durable  # noqa: E402
from tests.worlds import TORCH, Processes, processes  # noqa: E402


def _saved(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer, "schedule": training.schedule}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits_in_another_process(kind: str, tmp_path: Path) -> None:
    training = Training(kind)
    training.train(0, 3)
    hvd.save(tmp_path, **_saved(training), step=3)
    training.train(3, 6)
    other = Training(kind, seed=1)
    assert hvd.load(tmp_path, **_saved(other)) == {"step": 3}
    other.train(3, 6)
    assert other.bits() == training.bits()


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    training = Training()
    training.train(0, 2)
    hvd.save(tmp_path, **_saved(training))
    other = Training(seed=1)
    before = other.bits()
    wider = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2))
    with pytest.raises(hvd.CheckpointError, match=r"nothing was loaded: rank 0: ValueError: 'model' is not what was saved: "
                                                  r"0.weight is torch.float32 \[9, 6\] here, and torch.float32 \[8, 6\] in"):
        hvd.load(tmp_path, schedule=other.schedule, model=wider)
    with pytest.raises(hvd.CheckpointError, match=r"'optimizer' is not what was saved: it is Adam \[\] here, and SGD"):
        hvd.load(tmp_path, model=other.model, optimizer=torch.optim.Adam(other.model.parameters()))
    with pytest.raises(hvd.CheckpointError, match=r"'optimizer' is not what was saved: group 0 is parameters \[2\]"):
        hvd.load(tmp_path, model=other.model, optimizer=torch.optim.SGD(other.model[0].parameters(), lr=0.1))
    assert other.bits() == before


class Versioned(torch.nn.Module):
    """Halves weights of older versions."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    module = torch.nn.Sequential(Versioned())
    hvd.save(tmp_path, module=module)
    assert hvd.load(tmp_path, module=module) == {} and module[0].weight.tolist() == [1.0, 1.0]


def test_names_of_different_parts_are_kept_apart(tmp_path: Path) -> None:
    hvd.save(tmp_path, **{"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}})
    found = hvd.load(tmp_path)
    assert found is not None and found["a.b"].tolist() == [0, 0] and found["a"]["b"].tolist() == [1, 1]
    for name in ("random states", "__metadata__"):
        with pytest.raises(ValueError, match=f"'{name}' is the name of a part of every checkpoint"):
            hvd.save(tmp_path, **{name: torch.ones(1)})
    with pytest.raises(hvd.CheckpointError, match=r"'x\.y' cannot be saved: 'a tensor' is sparse"):
        hvd.save(tmp_path, x={"y": torch.eye(2).to_sparse()})


def test_tensors_load_in_place_and_without_torch_they_are_arrays(tmp_path: Path) -> None:
    tensor = torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).t()
    hvd.save(tmp_path, tensor=tensor, shape=tensor.shape, nothing=torch.empty(0, 3))
    target = torch.zeros(2, 2, dtype=torch.bfloat16)
    others = hvd.load(tmp_path, tensor=target)
    assert torch.equal(target, tensor) and others is not None and others["shape"] == (2, 2)
    assert others["nothing"].shape == (0, 3)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_resumed_job_has_the_losses_of_an_undisturbed_one(blocking: bool, tmp_path: Path) -> None:
    """With Dropout and BatchNorm, whose statistics differ between ranks, to the last bit."""
    whole = processes(2, checkpoints.losses, str(tmp_path / "none"), 0, 8, blocking, imported=TORCH)
    first = processes(2, checkpoints.losses, str(tmp_path / "some"), 4, 4, blocking, imported=TORCH)
    rest = processes(2, checkpoints.losses, str(tmp_path / "some"), 0, 8, blocking, imported=TORCH)
    assert [each.result for each in whole] == [[*one.result, *other.result] for one, other in zip(first, rest, strict=True)]


@pytest.mark.parametrize("blocking", [True, False])
def test_whenever_ranks_are_killed_a_whole_checkpoint_is_there(blocking: bool, tmp_path: Path) -> None:
    chance = random.Random(blocking)
    for _ in range(3):
        with Processes(2, checkpoints.saves_for_ever, str(tmp_path), blocking, imported=TORCH) as world:
            world.wait_for_all("saves")
            time.sleep(chance.random() * 0.3)
            world.kill(chance.randrange(2))
            world.wait()
        steps = {each.result for each in processes(3, checkpoints.loads, str(tmp_path), imported=TORCH)}
        assert len(steps) == 1 and min(steps) >= blocking, "in the background the second one may be under way"


def test_all_ranks_get_the_error_of_one(tmp_path: Path) -> None:
    for each in processes(2, checkpoints.one_rank_cannot, str(tmp_path), imported=TORCH):
        one, both = each.result
        assert "rank 1: UnsupportedError: 'y' cannot be saved: it is a builtins.object" in one
        assert "rank 0: " in both and "rank 1: " in both
    assert os.listdir(tmp_path) == ["checkpoint-000001"]


def test_a_job_waits_for_its_checkpoint_before_it_ends_and_a_dead_rank_ends_the_wait(tmp_path: Path) -> None:
    with Processes(2, checkpoints.ends_in_the_middle, str(tmp_path), imported=TORCH) as world:
        assert [each.code for each in world.wait()][1] == -9
    assert {each.result for each in processes(2, checkpoints.loads, str(tmp_path), imported=TORCH)} <= {1, 2}


def _trained(folder: Path, size: int, fails_at: int = 0) -> Any:
    with Processes(size, durable.train, str(folder), 3, fails_at, imported=TORCH) as world:
        ended = world.wait()
    return None if fails_at else ended[0].result


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 1)])
def test_a_state_goes_on_in_another_job_with_any_number_of_ranks(sizes: tuple[int, int], tmp_path: Path) -> None:
    losses, parameters = _trained(tmp_path / "whole", 2)
    _trained(tmp_path / "some", sizes[0], fails_at=8)
    resumed = hvd.load(tmp_path / "some")
    assert resumed is not None and 3 <= len(resumed["losses"]) <= 8 and resumed["epoch"] < 3
    again = _trained(tmp_path / "some", sizes[1])
    assert again[0] == pytest.approx(losses, rel=1e-9) and again[1] == pytest.approx(parameters, rel=1e-9)
    last = _trained(tmp_path / "some", 2)  # at most the steps after the last checkpoint are left: ranks agree on it late
    assert last[0] == pytest.approx(again[0], rel=1e-9) and last[1] == pytest.approx(again[1], rel=1e-9)


def test_a_state_of_the_scripts_own_class_has_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(hvd.UnsupportedError, match="what belongs to a State is not known"):
        hvd.elastic.State().checkpoint(tmp_path)
    with pytest.raises(ValueError, match="every='soon' is no interval; use seconds, or such as '90 s', '10 min', '2 h'"):
        hvd.elastic.ObjectState().checkpoint(tmp_path, every="soon")
