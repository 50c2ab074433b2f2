"""Elastic states of several ranks: what `sync` sends, compares and refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch as hvd  # noqa: E402
from hvdlite import api  # noqa: E402
from hvdlite.core.errors import ReplicaMismatchError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite.training.elastic.state import ObjectState  # noqa: E402
from hvdlite_torch.elastic import (  # noqa: E402
    ElasticSampler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
    torch_state,
)
from tests.torch.elastic_training import OPTIMIZERS, Training  # noqa: E402
from tests.worlds import threads  # noqa: E402


@pytest.mark.parametrize("method", ["save", "sync"])
def test_handlers_of_ones_own_save_all_or_nothing(as_ranks: Callable[..., list[Any]], method: str) -> None:
    """They may make collectives, the second of which a death interrupts."""
    class Shard:
        def __init__(self, *, is_lost: bool = False) -> None:
            self.value, self.is_lost = 0, is_lost

    class ShardHandler(StateHandler):
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            self.saved = value.value

        def save(self) -> None:
            if self.value.is_lost and self.value.value == 2:
                raise hvd.HorovodInternalError("lost")
            self.saved = self.value.value

        def sync(self) -> None:
            self.save()

        def restore(self) -> None:
            self.value.value = self.saved

    def step(rank: int) -> None:
        first, second, training = Shard(), Shard(is_lost=True), Training()
        state = TorchState(training.model, first=first, second=second, step=0)
        first.value = second.value = state.step = 1
        state.commit()
        committed = training.bits()
        first.value = second.value = state.step = 2
        training.train(0, 1)
        with pytest.raises(hvd.HorovodInternalError):
            getattr(state, method)()
        state.restore()
        assert (first.value, second.value, state.step, training.bits()[:7]) == (1, 1, 1, committed[:7])

    before = get_handler_registry()
    set_handler_registry([*before, (Shard, ShardHandler)])
    try:
        as_ranks(step)
    finally:
        set_handler_registry(before)


# --- two ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """Return a function that runs a step on two threads, to each of which the process's runtime is its own."""
    own = threading.local()
    monkeypatch.setattr(api, "runtime", lambda: own.runtime)
    monkeypatch.setattr(api, "is_initialized", lambda: True)
    monkeypatch.setattr(api, "is_provisional", lambda: False)
    monkeypatch.setattr(api, "rank", lambda: own.runtime.world.rank)
    monkeypatch.setattr(api, "size", lambda: own.runtime.world.size)

    def run(step: Callable[[int], Any]) -> list[Any]:
        def begin(runtime: Runtime) -> Any:
            own.runtime = runtime
            return step(runtime.world.rank)
        return threads(2, begin)
    yield run


def test_sync_divides_what_samplers_have_left_anew_on_all_ranks(as_ranks: Callable[..., list[Any]]) -> None:
    def step(rank: int) -> tuple[int, int]:
        sampler = ElasticSampler(range(40))
        state = TorchState(sampler=sampler)
        if rank == 0:
            sampler.record_batch(0, 4)
        state.sync()
        left = len(sampler)
        sampler.set_epoch(0)
        return left, len(list(sampler))

    assert as_ranks(step) == [(16, 16)] * 2, "the epoch goes on, on all ranks alike"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_sync_gives_all_ranks_the_bits_of_rank_0(as_ranks: Callable[..., list[Any]], kind: str) -> None:
    trainings = [Training(kind, seed) for seed in (0, 1)]
    trainings[0].train(0, 3)
    if kind != "adam":  # the other rank's optimizer has no state yet
        trainings[1].train(7, 8)

    def step(rank: int) -> Any:
        state = trainings[rank].state(mask={"kept": torch.full((2,), float(rank))})
        if rank == 0:
            state.commit()
            state.step = 3
        state.sync()
        synced = trainings[rank].bits(), state.step, state._commits, state.mask["kept"].tolist()
        trainings[rank].train(3, 5)
        state.restore()
        assert (trainings[rank].bits(), state.step, state._commits, state.mask["kept"].tolist()) == synced
        trainings[rank].train(3, 6)
        return synced, trainings[rank].bits()

    first, second = as_ranks(step)
    assert first == second and first[0][1:] == (3, 1, [0, 0])


def test_a_sync_that_fails_changes_nothing(as_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [Training("adam", seed) for seed in (0, 1)]
    trainings[1].train(0, 1)

    def fail(*arguments: Any) -> None:
        for tensor in arguments[1]:
            tensor.zero_()  # a part of it has come
        raise hvd.HorovodInternalError("lost")

    def step(rank: int) -> None:
        state = trainings[rank].state()
        state.step = 5
        before = trainings[rank].bits()
        with pytest.raises(hvd.HorovodInternalError):
            state.sync()
        assert trainings[rank].bits() == before and state.step == 5
        state.restore()
        assert trainings[rank].bits() == before and state.step == 0

    monkeypatch.setattr(torch_state, "broadcast_tensors", fail)
    as_ranks(step)


@pytest.mark.parametrize(("change", "sent"), [
    (lambda own, state: None, 0),
    (lambda own, state: own.optimizer.param_groups[0].update(lr=0.2), 6),
    (lambda own, state: own.model[0].weight.data[0, 0].neg_(), 6),
    (lambda own, state: own.model[0].weight.data.copy_(own.model[0].weight.data.flip(0)), 6),
    (lambda own, state: own.model[1].running_mean.neg_(), 3),
    (lambda own, state: state.mask["kept"].add_(1), 1)], ids=["nothing", "rate", "sign", "order", "statistics", "attribute"])
def test_only_what_differs_on_some_rank_is_sent(as_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch,
                                                change: Callable[[Training, TorchState], Any], sent: int) -> None:
    counts = []
    broadcast = torch_state.broadcast_tensors
    monkeypatch.setattr(torch_state, "broadcast_tensors",
                        lambda *arguments: (counts.append(len(arguments[1])), broadcast(*arguments)))

    trainings = [Training("sgd") for _ in range(2)]  # not on the threads: torch's generator is everybody's
    for training in trainings:
        training.train(0, 2)

    def step(rank: int) -> Any:
        training = trainings[rank]
        state = training.state(mask={"kept": torch.ones(2)})
        if rank == 1:
            change(training, state)
        state.sync()
        synced = training.bits(), state.mask["kept"].tolist()
        training.train(2, 3)
        state.mask["kept"].zero_()
        state.restore()
        assert (training.bits(), state.mask["kept"].tolist()) == synced
        return synced

    first, second = as_ranks(step)
    assert first == second and counts == [sent] * 2


def test_states_that_differ_are_an_error(as_ranks: Callable[..., list[Any]]) -> None:
    def step(rank: int) -> None:
        training = Training()
        state = training.state() if rank == 0 else TorchState(training.model)
        state.sync()

    with pytest.raises(ValueError, match=r"rank 0's elastic state has model, optimizer, schedule, step, and rank 1"):
        as_ranks(step)


@pytest.mark.parametrize(("corrupt", "name"), [
    (lambda own: own.model[0].weight.data[0, 0].add_(1), "state.model.0.weight"),
    (lambda own: own.optimizer.state[own.model[0].bias]["momentum_buffer"][0].add_(1),
     "state.optimizer.state.1.momentum_buffer"),
    (lambda own: own.optimizer.param_groups[0].update(lr=0.2), "state.optimizer.param_groups.0.lr")])
def test_replicas_that_differ_after_sync_are_an_error(as_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch,
                                                      corrupt: Callable[[Training], Any], name: str) -> None:
    """See docs/protocol.md#equal-replicas."""
    saved = ObjectState.save
    monkeypatch.setattr(ObjectState, "save", lambda state: (saved(state), corrupt(state) if api.rank() == 1 else None))

    def step(rank: int) -> None:
        training = Training("sgd", seed=rank)
        training.train(0, 2)
        with pytest.raises(ReplicaMismatchError, match=f"replicas differ in '{name}': rank 0: .*; rank 1: "):
            training.state().sync()
    as_ranks(step)


class OfItsRank(torch.nn.Linear):
    """Tells the rank in its state dict."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.number = api.rank()

    def get_extra_state(self) -> Any:
        return torch.tensor([self.number])

    def set_extra_state(self, state: Any) -> None:
        """Keep its own."""


class Schedule(torch.optim.lr_scheduler.StepLR):
    """Likewise."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.number = api.rank()
        super().__init__(optimizer, 1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]


def test_what_ranks_may_have_for_themselves_is_not_compared(as_ranks: Callable[..., list[Any]]) -> None:
    """A false alarm would end the job."""
    def step(rank: int) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        state = TorchState(OfItsRank(), optimizer, schedule=Schedule(optimizer), epoch=0)
        state.writer = object() if rank == 0 else None
        if rank == 1:
            state.best, state.local = torch.ones(3), 5
        state.sync()
        assert state.model.number == state.schedule.number == rank
    as_ranks(step)


def test_copies_of_milestones_have_the_same_counts(as_ranks: Callable[..., list[Any]]) -> None:
    """`MultiStepLR` keeps them in a Counter, which adds what it is updated with."""
    def step(rank: int) -> None:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])
        state = TorchState(optimizer=optimizer, schedule=schedule)
        state.sync()
        state.commit()
        state.restore()
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
    as_ranks(step)


def test_a_sampler_and_handlers_by_themselves(as_ranks: Callable[..., list[Any]]) -> None:
    def step(rank: int) -> Any:
        sampler = hvd.elastic.ElasticSampler(range(20))
        training = Training(seed=rank)
        state = TorchState(sampler=sampler)
        if rank == 0:
            sampler.record_batch(0, 3)
        state.sync()
        state.on_reset()
        hvd.elastic.ModelStateHandler(training.model).sync()
        hvd.elastic.OptimizerStateHandler(training.optimizer).sync()
        return sampler.processed_num, len(sampler), training.bits(), sorted(sampler)

    first, second = as_ranks(step)
    assert first[:3] == second[:3] and first[:2] == (6, 7) and len({*first[3], *second[3]}) == 14
