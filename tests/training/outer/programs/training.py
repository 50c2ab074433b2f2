"""What ranks do in test_outer.py: they train NumPy arrays."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import numpy as np

import hvdlite as hvd
from hvdlite import api
from hvdlite.core.array import Array
from hvdlite.core.errors import MismatchError, PeerLostError, ReplicaMismatchError, UnsupportedError
from hvdlite.training.outer.outer import Outer, Parameter, agree_on_workers
from hvdlite.training.outer.schedule import divide
from hvdlite.training.outer.settings import DiLoCo, LocalSGD
from tests.training.outer.programs.oracle import train

SIZES = (5, 1, 3000, 40, 2500, 0, 700)


@dataclasses.dataclass
class Weights:
    """Implements `LocalWeights` for arrays."""

    arrays: list[Array]

    def read(self, parameters: range, dtype: np.dtype[np.floating]) -> Array:
        return np.concatenate([self.arrays[index].astype(dtype) for index in parameters])

    def write(self, parameters: range, values: Array) -> None:
        for index in parameters:
            self.arrays[index][:], values = np.split(values, [self.arrays[index].size])

    def rounded(self, parameters: range, values: Array) -> Array:
        return np.concatenate([part.astype(self.arrays[index].dtype).astype(values.dtype) for index, part in zip(
            parameters, np.split(values, np.cumsum([self.arrays[index].size for index in parameters])[:-1]), strict=True)])


def initial(dtype: str = "float32") -> list[Array]:
    draw = np.random.default_rng(1)
    return [draw.standard_normal(size).astype(dtype) for size in SIZES]


def learn(worker: int, step: int, arrays: list[Array]) -> None:
    """Change all parameters but the second one, which is frozen, by what depends on the worker and the step."""
    draw = np.random.default_rng((worker, step))
    for index, each in enumerate(arrays):
        if index != 1:
            each -= (0.1 * (each - worker) + 0.01 * draw.standard_normal(each.size)).astype(each.dtype)


def begin(settings: DiLoCo, arrays: list[Array], label: str, state: object = None) -> tuple[Outer, int]:
    """Return this rank's part, and the index of its worker."""
    runtime = api.runtime()
    workers = settings.ranks_of_workers(runtime.hosts)
    parameters = [Parameter(f"p{index}", each.size, str(each.dtype)) for index, each in enumerate(arrays)]
    outer = Outer(runtime, label, settings, workers, parameters, Weights(arrays), state)  # type: ignore[arg-type]
    return outer, next(index for index, ranks in enumerate(workers) if runtime.world.rank in ranks)


def run(settings: DiLoCo, steps: Sequence[int], label: str, dtype: str = "float32") -> tuple[list[Array], Outer]:
    arrays = initial(dtype)
    outer, worker = begin(settings, arrays, label)
    for step in steps:
        learn(worker, step, arrays)
        outer.stepped()
    return arrays, outer


def same(these: Sequence[Array], those: Sequence[Array]) -> bool:
    return all(map(np.array_equal, these, those))


def equals_the_oracle(workers: str) -> None:
    """Bit by bit, without delay and 8 bits."""
    hvd.init()
    for fragments in range(1, 6):
        for dtype in ("float32", "float64"):
            settings = DiLoCo(7, workers=workers, fragments=fragments, delay=0, wire=None, nesterov=fragments != 2,
                              momentum=0.0 if fragments == 3 else 0.9)
            arrays, outer = run(settings, range(1, 24), f"{fragments}.{dtype}", dtype)
            ranks = settings.ranks_of_workers(api.runtime().hosts)
            index = next(index for index, own in enumerate(ranks) if hvd.rank() in own)
            local, weights = train(settings, initial(dtype), divide(SIZES, fragments), len(ranks), 23, learn)
            assert same([values for _, values in outer.global_weights()], weights), (fragments, dtype)
            assert same(arrays, local[index]), (fragments, dtype)
            outer.close()


def local_sgd_averages(workers: str) -> None:
    """The mean of all workers after every step; merging everything brings the same."""
    hvd.init()
    arrays, outer = run(LocalSGD(1, workers=workers), range(1, 6), "each step", "float64")
    wanted, count = initial("float64"), len(LocalSGD(1, workers=workers).ranks_of_workers(api.runtime().hosts))
    for step in range(1, 6):
        local = [[each.copy() for each in wanted] for _ in range(count)]
        for worker in range(count):
            learn(worker, step, local[worker])
        wanted = [np.mean(each, axis=0) for each in zip(*local, strict=True)]
    assert all(np.allclose(own, mean, rtol=0, atol=1e-14) for own, mean in zip(arrays, wanted, strict=True))
    outer.synchronize()
    assert outer.step == 5 and all(np.allclose(own, mean, rtol=0, atol=1e-14)
                                   for own, mean in zip(arrays, wanted, strict=True))
    outer.close()


def synchronizing_averages() -> None:
    """Without the outer optimizer: its momentum stays, and does not move the weights."""
    hvd.init()
    settings = DiLoCo(4, workers="rank", fragments=2, delay=0, wire=None)
    arrays, outer = run(settings, range(1, 11), "averages", "float64")
    before = [each["momentum"] for each in outer.state()["fragments"]]
    mean = np.zeros(sum(SIZES))
    api.runtime().allreduce("mean", np.concatenate(arrays), mean, api.Average).wait()
    outer.synchronize()
    assert np.allclose(np.concatenate(arrays), mean, rtol=0, atol=1e-12)
    assert same([each["momentum"] for each in outer.state()["fragments"]], before) and before[0].any()
    outer.check_replicas()
    outer.close()


def resumes_anywhere(workers: str) -> None:
    """A state of any step leads to the same parameters, with exchanges under way and errors of rounding, too."""
    hvd.init()
    for wire, merge, delay in ((None, "carry", 2), ("int8", "carry", 1), ("int8", 0.25, 3)):
        settings = DiLoCo(6, workers=workers, fragments=3, delay=delay, merge=merge, wire=wire)
        arrays, outer = initial(), None
        states = []
        outer, worker = begin(settings, arrays, f"{wire}.{merge}")
        for step in range(1, 20):
            learn(worker, step, arrays)
            outer.stepped()
            outer.check_replicas()
            states.append((outer.state(), [each.copy() for each in arrays]))
        assert any(each["start"] is not None for each in states[-1][0]["fragments"])
        outer.close()
        for done in range(1, 19):
            state, again = states[done - 1]
            other, _ = begin(settings, again, f"{wire}.{merge}.{done}", state)
            for step in range(done + 1, 20):
                learn(worker, step, again)
                other.stepped()
            assert same(again, arrays), (wire, merge, done)
            assert same([each for _, each in other.global_weights()], [each for _, each in outer.global_weights()])
            other.close()


def merges(workers: str) -> None:
    """"carry" keeps what was learned during an exchange, and a number mixes."""
    hvd.init()
    for merge, share in (("carry", 1.0), (0.25, 0.25), (0, 0.0)):
        settings = DiLoCo(4, workers=workers, fragments=1, delay=2, merge=merge, wire=None, lr=1.0, momentum=0.0,
                          nesterov=False)
        arrays = [np.zeros(3)]
        outer, worker = begin(settings, arrays, f"merge.{merge}")
        count = len(settings.ranks_of_workers(api.runtime().hosts))
        for _ in range(4):
            arrays[0] += worker + 1.0
            outer.stepped()
        mean = 2 * np.mean(np.arange(count) + 1.0)  # of the first two steps
        wanted = mean + 2 * (worker + 1.0) if merge == "carry" else share * 4 * (worker + 1.0) + (1 - share) * mean
        assert np.allclose(arrays[0], wanted, atol=1e-12), (merge, arrays, wanted)
        outer.synchronize()
        mean = np.zeros(1)
        api.runtime().allreduce(f"compare.{merge}", np.array([arrays[0][0]]), mean, api.Average).wait()
        assert np.allclose(mean[0], arrays[0], rtol=0, atol=1e-12)
        outer.close()


def synchronizing_in_the_first_period() -> None:
    """Merges what would have been merged when the delay is agreed on: that waits for the next merge."""
    hvd.init()
    settings = DiLoCo(8, workers="rank", fragments=2)
    arrays = initial()
    outer, worker = begin(settings, arrays, "first period")
    for step in range(1, 13):
        learn(worker, step, arrays)
        outer.stepped()
        if step == 6:
            outer.synchronize()
        assert outer.state()["has_delay"] == (step == 12), step
    outer.close()


def unusual_parameters() -> None:
    """None at all work; integers are refused."""
    hvd.init()
    outer, _ = begin(DiLoCo(3, workers="rank"), [], "none")
    for _ in range(8):
        outer.stepped()
    outer.synchronize()
    assert outer.global_weights() == []
    outer.close()
    try:
        begin(DiLoCo(3, workers="rank"), [np.ones(3), np.ones(2, np.int64)], "integers")
    except UnsupportedError as error:
        assert "'p1' is int64" in str(error), error
    else:
        raise AssertionError("integers are trained")


def errors_belong_to_a_rank() -> None:
    """A state of another rank, or of other workers, has the weights, and not the errors."""
    hvd.init()
    settings = DiLoCo(2, workers="rank", fragments=1, delay=0)
    _, outer = run(settings, range(1, 9), "own")
    own = outer.state()
    assert own["fragments"][0]["errors"] is not None
    for state, are_kept in ((own, True), ({**own, "rank": own["rank"] + 1}, False),
                            ({**own, "workers": [[0], [1, 2]]}, False)):
        other, _ = begin(settings, initial(), f"{are_kept}.{len(state['workers'][1])}", state)
        assert (other.state()["fragments"][0]["errors"] is not None) == are_kept
        assert same([other.state()["fragments"][0]["weights"]], [own["fragments"][0]["weights"]])
        other.close()
    outer.close()


def measures_the_delay() -> None:
    """All ranks agree on it after the first period, and keep it in checkpoints."""
    hvd.init()
    settings = DiLoCo(8, workers="rank", fragments=2)
    arrays, outer = run(settings, range(1, 9), "measured")
    state = outer.state()
    assert state["has_delay"] and 0 <= state["delay"] <= 3
    for step in range(9, 30):
        learn(hvd.rank(), step, arrays)
        outer.stepped()
    outer.check_replicas()
    other, _ = begin(settings, arrays, "again", outer.state())
    assert other.state()["delay"] == state["delay"] and other.state()["has_delay"]
    outer.close()
    other.close()


def refused() -> None:
    """What ranks have to have in common is compared before anything is exchanged."""
    hvd.init()
    rank = hvd.rank()
    for settings, what in ((DiLoCo(4 + rank), "every=4"), (DiLoCo(4, lr=0.5 + rank), "lr=0.5"),
                           (DiLoCo(4, workers=["host", "rank"][rank]), "workers=[[0, 1]]")):
        try:
            agree_on_workers(api.runtime(), settings, what)
        except MismatchError as error:
            assert what in str(error) and "on rank 1" in str(error), error
        else:
            raise AssertionError("ranks train with different settings")
    arrays = initial()
    arrays[3][2] += rank
    try:
        begin(DiLoCo(4, workers="rank"), arrays, "values")
    except ReplicaMismatchError as error:
        assert "'p3'" in str(error) and "broadcast_parameters" in str(error), error
    else:
        raise AssertionError("ranks begin with different weights")
    try:
        begin(DiLoCo(4, workers="rank"), initial()[:6 + rank], "number")
    except ReplicaMismatchError as error:
        assert "'p6' of rank 0: missing; rank 1: there" in str(error), error
    else:
        raise AssertionError("a parameter is on one rank only")
    outer, _ = begin(DiLoCo(4, workers="rank", fragments=2), initial(), "fits")
    state = outer.state()
    outer.close()
    try:
        begin(DiLoCo(4, workers="rank", fragments=2), initial(), "step", {**state, "step": 3 * rank})
    except MismatchError as error:
        assert "step 0" in str(error) and "step 3" in str(error) and "on rank 1" in str(error), error
    else:
        raise AssertionError("states of different steps were loaded")
    try:
        begin(DiLoCo(4, workers="rank", fragments=3), initial(), "does not fit", state)
    except ValueError as error:
        assert "fragments" in str(error)
    else:
        raise AssertionError("a state that does not fit was loaded")


def a_rank_dies() -> None:
    """While exchanges are under way: the others name it."""
    hvd.init()
    settings = DiLoCo(4, workers="rank", fragments=2, delay=1)
    arrays = initial()
    outer, worker = begin(settings, arrays, "dies")
    try:
        for step in range(1, 100):
            learn(worker, step, arrays)
            outer.stepped()
            if hvd.rank() == 1 and step == 7:
                os._exit(3)
    except PeerLostError as error:
        assert error.rank == 1, error
        print("named", flush=True)
        raise


def a_rank_ends_early(skips: bool) -> None:
    """The others' merges name it, whether it skips a step or has fewer batches."""
    hvd.init()
    settings = DiLoCo(3, workers="rank", fragments=1, delay=1)
    arrays = initial()
    outer, worker = begin(settings, arrays, "early")
    try:
        for step in range(1, 10):
            if hvd.rank() == 1 and (step in (4, 5) if skips else step > 4):  # it never begins the exchange of step 8
                continue
            learn(worker, step, arrays)
            outer.stepped()
    except PeerLostError as error:
        assert error.rank == 1 and hvd.rank() != 1, error
        print("named", flush=True)
    hvd.shutdown()
