"""Optimizers that live longer than a world: after a failure in the middle of anything, they train on in the next one."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite import api  # noqa: E402
from hvdlite.core.errors import HorovodInternalError, NotInitializedError, UnsupportedError  # noqa: E402
from hvdlite.core.types import ReduceOp  # noqa: E402
from hvdlite.runtime.assemble import Learned  # noqa: E402
from hvdlite.runtime.followers import Followers  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import DistributedOptimizer, comm_hooks  # noqa: E402
from hvdlite_torch.elastic.handlers import ScalerStateHandler  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.elastic_jobs import ElasticJob  # noqa: E402
from tests.raising import raises  # noqa: E402
from tests.torch.mirroring import strategy_on  # noqa: E402
from tests.torch.models import by_bucket, net, weights  # noqa: E402
from tests.torch.programs import worlds as programs  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402

STEPS = 4
"""In each world: enough for learned buckets."""


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def wrap(plain: Any, runtime: Runtime | None, **options: Any) -> Any:
    return DistributedOptimizer(plain, **options) if runtime is None else wrap_optimizer(plain, runtime=runtime, **options)


def loss(model: Any, rank: int, turn: int) -> Any:
    generator = torch.Generator().manual_seed(100 * rank + turn)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


def plainly(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    member.optimizer.zero_grad()
    value = loss(member.model, rank, turn)
    die()
    value.backward()
    member.optimizer.step()


def not_clearing_first(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    loss(member.model, rank, turn).backward()
    die()
    member.optimizer.step()
    member.optimizer.zero_grad()


def in_two_passes(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    member.optimizer.zero_grad()
    loss(member.model, rank, turn).backward()
    die()
    loss(member.model, rank, turn + 50).backward()
    member.optimizer.step()


def between_backward_and_step(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    member.optimizer.zero_grad()
    loss(member.model, rank, turn).backward()
    die()
    torch.nn.utils.clip_grad_norm_(member.model.parameters(), 0.05)
    member.optimizer.step()


def with_a_closure(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    calls = []

    def closure() -> Any:
        member.optimizer.zero_grad()
        value = loss(member.model, rank, turn)
        value.backward()
        calls.append(None)
        if len(calls) == 2:
            die()
        return value
    member.optimizer.step(closure)


def with_a_scaler(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    member.optimizer.zero_grad()
    scaler.scale(loss(member.model, rank, turn)).backward()
    die()
    scaler.unscale_(member.optimizer)
    scaler.step(member.optimizer)
    scaler.update()


def with_weights(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    member.optimizer.zero_grad()
    for part in range(2):
        member.optimizer.set_weight((3 * turn + 5 * rank + part) % 4)
        loss(member.model, rank, turn + 50 * part).backward()
        if part == 0:
            die()
    member.optimizer.step()


def thawing(member: Member, rank: int, turn: int, die: Callable[[], None]) -> None:
    member.model[0].weight.requires_grad_(turn % 10 >= 2)
    plainly(member, rank, turn, die)


@dataclasses.dataclass
class Kind:
    """A way to train."""

    train: Callable[..., None] = plainly
    make: Callable[[Any], Any] = sgd
    options: Callable[[Any], dict[str, Any]] = lambda model: {}
    buckets: bool = True


KINDS = {
    "in backward": Kind(),
    "before the first gradient is cleared": Kind(not_clearing_first),
    "waiting in the step": Kind(options=lambda model: {"wait_in": "step"}),
    "waiting in the step, which reads gradients": Kind(between_backward_and_step, options=lambda model: {"wait_in": "step"}),
    "between two accumulated passes": Kind(in_two_passes, options=lambda model: {"backward_passes_per_step": 2}),
    "between two reduced passes": Kind(in_two_passes),
    "in a closure": Kind(with_a_closure, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)),
    "with a scaler": Kind(with_a_scaler, options=lambda model: {"wait_in": "step"}),
    "with groups": Kind(options=lambda model: {"groups": [list(model.parameters())[:2]], "compression": None}),
    "thawing": Kind(thawing),
    "with weights": Kind(with_weights, options=lambda model: {"backward_passes_per_step": 2}),
    "Adasum": Kind(options=lambda model: {"op": ReduceOp.ADASUM}, buckets=False),
    "AllReduce": Kind(options=lambda model: {"comm_hook": comm_hooks.AllReduce()}, buckets=False),
    "PowerSGD": Kind(options=lambda model: {"comm_hook": comm_hooks.PowerSGD()}, buckets=False),
}


class Member:
    """A process of an elastic job, which is a thread here: its model and optimizer outlive worlds."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.model = kind, net()
        self.plain = kind.make(self.model)
        self.optimizer: Any = None
        self.steps = 0

    def wrap(self, runtime: Runtime | None) -> None:
        options = {name: value for name, value in self.kind.options(self.model).items() if value is not None}
        self.optimizer = wrap(self.plain, runtime, **options)

    def train(self, runtime: Runtime, turns: range, die: Callable[[], None] = lambda: None) -> None:
        for turn in turns:
            self.kind.train(self, runtime.world.rank, turn, die if turn == turns[-1] else lambda: None)
            self.steps += 1

    def like(self) -> Member:
        """Return a member with the same state, which has taken part in no world."""
        other = Member(self.kind)
        other.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        other.plain.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for own, its in zip(other.model.parameters(), self.model.parameters(), strict=True):
            own.requires_grad_(its.requires_grad)
        return other


def world_that_fails(members: list[Member]) -> None:
    """Train in a world until the last rank dies; the others' step fails where they are."""
    dead = threading.Event()

    def step(runtime: Runtime) -> None:
        member, is_last = members[runtime.world.rank], runtime.world.rank == len(members) - 1
        member.wrap(runtime)

        class Dead(Exception):
            pass

        def die() -> None:
            if is_last:
                runtime.fail("Dead", "on purpose", "")
                dead.set()
                raise Dead
            dead.wait()
        with pytest.raises(Dead if is_last else HorovodInternalError):
            member.train(runtime, range(STEPS), die)
            runtime.barrier("after").wait()  # if the last round was over by then
    threads(len(members), step)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_survivors_train_on_like_new_optimizers(kind: Kind) -> None:
    members = [Member(kind) for _ in range(3)]
    world_that_fails(members)
    survivors = members[1:] if kind.train is plainly else members[:2]
    for member in survivors:
        member.optimizer.world_ended()
        assert all(each.grad is None and type(each) is torch.nn.Parameter for each in member.model.parameters())
        survivors[0].optimizer.load_state_dict(survivors[0].optimizer.state_dict())  # what restores may do between worlds
        member.model.load_state_dict(survivors[0].model.state_dict())
        member.optimizer.load_state_dict(copy.deepcopy(survivors[0].optimizer.state_dict()))
    fresh = [member.like() for member in survivors]

    def again(runtime: Runtime, members: list[Member], are_new: bool) -> list[Any]:
        member = members[runtime.world.rank]
        member.wrap(runtime) if are_new else member.optimizer.world_began(runtime)
        member.train(runtime, range(10, 10 + STEPS))
        assert by_bucket(member.optimizer) if kind.buckets else True
        return weights(member.model)
    after = threads(2, again, survivors, False)
    expected = threads(2, again, fresh, True)
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)
    torch.testing.assert_close(after, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["in backward", "with groups", "between two accumulated passes"])
def test_learned_buckets_are_used_in_the_first_step_of_the_next_world(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See docs/protocol.md#carried-layouts."""
    members = [Member(KINDS[kind]) for _ in range(2)]
    followers = Followers()

    def before(runtime: Runtime) -> None:
        member = members[runtime.world.rank]
        member.wrap(runtime)
        member.train(runtime, range(STEPS))
        runtime.barrier("trained").wait()  # a rank that leaves ends the layout
        if runtime.world.rank == 0:
            followers.add(member.optimizer)
            followers.learned_in(runtime)
        runtime.barrier("kept").wait()
    threads(2, before)
    followers.world_ended()
    members[1].optimizer.world_ended()
    learned = Learned(followers.carried())
    assert list(learned.layouts) == ["torch.earlier.optimizer.0"]
    members.append(members[0].like())  # joins
    monkeypatch.setattr(api, "attached_runtime", lambda: None)
    members[2].wrap(None)

    def after(runtime: Runtime, first: bool) -> list[Any]:
        member = members[runtime.world.rank]
        runtime.barrier("met").wait()  # when it is over, the first decision is applied
        member.optimizer.world_began(runtime)
        member.train(runtime, range(10, 11))
        assert by_bucket(member.optimizer) is first
        member.train(runtime, range(11, 10 + STEPS))
        assert by_bucket(member.optimizer)
        member.optimizer.world_ended()
        return weights(member.model)
    one, *others = threads(3, after, True, learned=learned)
    for other in others:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for member in members:
        member.optimizer._settings.prescale = 2.0  # a layout with another factor would give wrong gradients
    threads(3, after, False, learned=learned)


def test_one_process_trains_to_the_same_weights() -> None:
    members = [Member(Kind()) for _ in range(3)]
    world_that_fails(members)
    steps = members[1].steps  # a rank may hear of the failure before it hears of the end of the last round
    state = copy.deepcopy((members[1].model.state_dict(), members[1].optimizer.state_dict()))

    def again(runtime: Runtime) -> list[Any]:
        member = members[1 + runtime.world.rank]
        member.optimizer.world_ended()
        member.model.load_state_dict(state[0])
        member.optimizer.load_state_dict(copy.deepcopy(state[1]))
        member.optimizer.world_began(runtime)
        member.train(runtime, range(10, 10 + STEPS))
        return weights(member.model)
    after = threads(2, again)
    alone = net()
    plain = sgd(alone)
    for turn, ranks in [*((turn, range(3)) for turn in range(steps)), *((10 + turn, range(2)) for turn in range(STEPS))]:
        plain.zero_grad()
        (sum(loss(alone, rank, turn) for rank in ranks) / len(ranks)).backward()
        plain.step()
    torch.testing.assert_close(after[0], weights(alone), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.ADASUM])
def test_a_world_of_one_rank_grows_by_an_optimizer_that_was_made_before_its_world(
        op: ReduceOp, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind(options=lambda model: {"op": op})
    old, joiner = Member(kind), Member(kind)

    def alone(runtime: Runtime) -> None:
        old.wrap(runtime)
        old.train(runtime, range(STEPS))
    threads(1, alone)
    old.optimizer.world_ended()
    monkeypatch.setattr(api, "attached_runtime", lambda: None)
    joiner.wrap(None)
    joiner.optimizer.zero_grad()
    joiner.optimizer.set_backward_passes_per_step(1)
    loss(joiner.model, 0, 0).backward()
    raises(NotInitializedError, "not initialised", joiner.optimizer.step)
    fresh = [old.like(), old.like()]
    joiner.model.load_state_dict(old.model.state_dict())
    joiner.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))

    def together(runtime: Runtime, members: list[Member], are_new: bool) -> list[Any]:
        member = members[runtime.world.rank]
        member.wrap(runtime) if are_new else member.optimizer.world_began(runtime)
        member.train(runtime, range(10, 10 + STEPS))
        return weights(member.model)
    after = threads(2, together, [old, joiner], False)
    torch.testing.assert_close(after, threads(2, together, fresh, True), rtol=0, atol=0)
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)


def test_a_scaler_forgets_a_step_that_failed() -> None:
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, handler = sgd(model), ScalerStateHandler(scaler)
    scaler.scale(loss(model, 0, 0)).backward()
    scaler.unscale_(optimizer)
    handler.restore()
    optimizer.zero_grad()
    scaler.scale(loss(model, 0, 0)).backward()
    scaler.unscale_(optimizer)  # again, which is an error within a step


def test_strategies_are_of_one_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_elastic", lambda: True)
    raises(UnsupportedError, "hvd.elastic.run", lambda: threads(1, lambda runtime: strategy_on(runtime)))


@pytest.mark.parametrize("worlds", [5, pytest.param(50, marks=pytest.mark.long)])
def test_many_worlds_leave_as_much_as_one(worlds: int) -> None:
    for rank in processes(2, programs.many_worlds, worlds, imported=TORCH):
        second, last, after = rank.result
        for what, of_second in second.items():
            assert last[what] == of_second, what
        assert after["runtimes"] == after["shared"] == 0


def test_an_elastic_job_grows_and_loses_its_first_rank(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with ElasticJob(programs.train_elastically, str(gate), slots={"a": 1}, imported=TORCH, min_np=1) as job:
        job.until_printed(0, "trained in world 1\n")
        job.see({"a": 3})
        job.until(lambda: any(len(order.members) == 3 for order in job.orders.values()))
        for member in range(3):
            job.until_printed(member, f"trained in world {max(job.orders)}\n")
        job.kill(0)
        job.until(lambda: 0 not in job.orders[max(job.orders)].members)
        members = job.orders[max(job.orders)].members
        for member in members:
            job.until_printed(member, f"trained in world {max(job.orders)}\n")
        gate.touch()
        results = job.finish()
    assert sorted(members) == [1, 2] and [results[member][-1] for member in members] == [(0, 2), (1, 2)]
