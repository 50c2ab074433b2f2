"""`state.loop`: bodies have the same samples in any world, and the losses of an undisturbed run."""

from __future__ import annotations

import collections
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, TensorDataset  # noqa: E402

from hvdlite import api  # noqa: E402
from hvdlite.training.mirrored.shares import Shares  # noqa: E402
from hvdlite_torch.elastic import ElasticSampler, TorchState, body_loader  # noqa: E402
from hvdlite_torch.elastic.body_loader import BodyLoader  # noqa: E402
from tests.elastic_jobs import ElasticJob  # noqa: E402
from tests.torch.programs.state_loop import EPOCHS, SAMPLES, replay, train  # noqa: E402
from tests.training.random_shares import draw_shares  # noqa: E402
from tests.worlds import TORCH  # noqa: E402


class Ended(Exception):
    """A world has ended."""


class Member:
    """A member whose world ends before a body."""

    def __init__(self, length: int, **options: Any) -> None:
        self._handlers: dict[str, Any] = {}
        self._place: Any = None
        self.epoch = 0
        self.left = 0
        self.loader = BodyLoader(DataLoader(torch.arange(length), shuffle=True, **options))

    def _begin_body(self) -> None:
        if not self.left:
            raise Ended
        self.left -= 1

    def _end_bodies(self) -> None:
        pass


def drawn_shares(rank: int, size: int, seed: int) -> Shares:
    """Return shares that the number of a body draws; equal ones for seed 0."""
    replicas: Any = SimpleNamespace(replica_id=rank, size=size)
    shares = Shares(replicas, "auto", compare=False)
    shares.is_auto = False
    if seed:
        draw_shares(shares, seed)
    return shares


def run_world(patch: pytest.MonkeyPatch, members: list[Member], steps: int, epochs: int, rows: int,
              ledger: dict[tuple[int, int], list[int]], seed: int) -> None:
    """Run steps of a world; `ledger` gets the samples of each body of each epoch."""
    place, epoch, sent = members[0]._place, members[0].epoch, list[Any]()
    for rank, member in enumerate(members):
        torch.manual_seed(rank)  # others than rank 0 would draw other orders
        member._place, member.epoch, member.left = place, epoch, steps
        patch.setattr(api, "rank", lambda rank=rank: rank)
        patch.setattr(api, "size", lambda: len(members))
        patch.setattr(api, "runtime", lambda rank=rank: SimpleNamespace(world=SimpleNamespace(rank=rank)))
        patch.setattr(body_loader, "shares_of_world", lambda *_, rank=rank: drawn_shares(rank, len(members), seed))
        waiting = iter(sent) if rank else None
        patch.setattr(body_loader, "broadcast_object", lambda runtime, value, *_, waiting=waiting: (
            sent.append(value) or value if waiting is None else next(waiting)))
        try:
            for batch in member.loader.bodies(member, epochs, rows):
                body = ledger[member.epoch, member._place["consumed"]]
                body += [] if batch.tolist() == body else batch.tolist()  # a short one goes to all ranks
        except Ended:
            pass


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 30), rows=st.integers(1, 8), drops=st.booleans(),
       worlds=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=5), seed=st.integers(0, 99))
def test_bodies_are_the_same_whatever_the_world(length: int, rows: int, drops: bool, worlds: list[tuple[int, int]],
                                                seed: int) -> None:
    def ledger_of(worlds: list[tuple[int, int]]) -> dict[tuple[int, int], list[int]]:
        ledger: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        members: list[Member] = []
        with pytest.MonkeyPatch.context() as patch:
            for size, steps in worlds:
                members = [*members[:size], *(Member(length, batch_size=2, drop_last=drops)
                                              for _ in range(len(members), size))]
                run_world(patch, members, steps, 2, rows, ledger, seed)
        return ledger
    whole = ledger_of([(1, 1000)])
    assert ledger_of([*worlds, (1, 1000)]) == whole
    for epoch in range(2):
        count = collections.Counter(each for (at, _), body in whole.items() if at == epoch for each in body)
        assert len(count) == (length // rows * rows if drops else length) and max(count.values(), default=1) == 1


def test_what_cannot_be_cut_by_position_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "rank", lambda: 0)
    monkeypatch.setattr(api, "size", lambda: 2)
    data = TensorDataset(torch.arange(8))
    state = TorchState(torch.nn.Linear(1, 1))
    stream = type("Stream", (IterableDataset,), {"__iter__": lambda self: iter("ab")})()
    for loader, error, text in (
            ([1, 2], TypeError, "no list"), (DataLoader(stream), TypeError, "no DataLoader of a Stream"),
            (DataLoader(data, sampler=DistributedSampler(data, 2, 0)), ValueError, "DistributedSampler does so, too"),
            (DataLoader(data, sampler=ElasticSampler(data)), ValueError, "ElasticSampler does so, too"),
            (DataLoader(data, batch_sampler=[[0, 1]]), ValueError, "instead of the list a sampler of single samples")):
        with pytest.raises(error, match=text):
            state.loop(loader, 1)
    for shares in ("fast", [1, 0], {"a": -1}, 3):
        with pytest.raises(ValueError, match="a list of positive numbers, one a rank, or a dict of them by host"):
            state.loop(DataLoader(data, 4), 1, shares=shares)
    for wrong in (0, True, 2.5, "all"):
        with pytest.raises(ValueError, match="global_batch is the number of samples of all ranks together"):
            state.loop(DataLoader(data, 4), 1, wrong)
    rows: list[int] = []
    state.on_scale(rows.append)
    state.loop(DataLoader(data, 4), 1)
    state.loop(DataLoader(data, 4), 1, "scale")
    assert rows == [8]


def test_the_place_goes_back_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "rank", lambda: 0)
    monkeypatch.setattr(api, "size", lambda: 1)
    monkeypatch.setattr(api, "runtime", lambda: SimpleNamespace(world=SimpleNamespace(rank=0)))
    monkeypatch.setattr(body_loader, "broadcast_object", lambda runtime, value, *_: value)
    monkeypatch.setattr(body_loader, "shares_of_world", lambda *_: drawn_shares(0, 1, 0))
    loader = DataLoader(torch.arange(10), 4, shuffle=True)
    state = TorchState(torch.nn.Linear(1, 1))
    whole = [batch.tolist() for batch in itertools.islice(state.loop(loader, 3), 5)]
    assert state.epoch == 1
    state.save()
    later = [batch.tolist() for batch in state.loop(loader, 3)]
    assert state.epoch == 3 and sorted(itertools.chain(*whole[3:], *later[:1])) == list(range(10))
    state.restore()
    assert state.epoch == 1 and [batch.tolist() for batch in state.loop(loader, 3)] == later
    state.epoch = 2
    assert len(list(state.loop(loader, 3))) == 3, "another epoch of the script's"
    fresh = TorchState(torch.nn.Linear(1, 1))
    other = DataLoader(torch.arange(10), 4, shuffle=True)
    whole = [batch.tolist() for batch in itertools.islice(fresh.loop(other, 3), 5)]
    fresh.restore()
    assert fresh.epoch == 0
    again = [batch.tolist() for batch in fresh.loop(other, 3)]
    assert len(again) == 9 and again[:5] == whole, "to the beginning"


def judge(results: dict[int, Any], batch: int = 5) -> Any:
    """Check that members have the ledger and the losses of a run without events; return what one of them told."""
    told = agreed(results)
    ledger, whole = told["ledger"], undisturbed(batch, told["ledger"][-1][0] + 1)
    assert ledger == whole[:len(ledger)]
    for epoch in range(ledger[-1][0]):
        assert sorted(samples(ledger, epoch)) == list(range(SAMPLES))
    return told


def agreed(results: dict[int, Any]) -> Any:
    """Check that members agree, and have the losses of one process; return what one of them told."""
    told = next(iter(results.values()))
    for name in ("ledger", "losses", "sizes", "scaled"):
        assert all(result[name] == told[name] for result in results.values()), name
    assert told["losses"] == pytest.approx(replay(told["ledger"]), abs=1e-9)
    return told


def samples(ledger: list[tuple[int, ...]], epoch: int) -> list[int]:
    return [each for at, *rows in ledger if at == epoch for each in rows]


def undisturbed(batch: int, epochs: int) -> list[tuple[int, ...]]:
    sampler, ledger = RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(8)), list[tuple[int, ...]]()
    for epoch in range(epochs):
        order = list(sampler)
        ledger += [(epoch, *order[begin:begin + batch]) for begin in range(0, SAMPLES, batch)]
    return ledger


@pytest.mark.parametrize(("victim", "workers", "late", "shares"), [
    (0, 0, False, None), (1, 0, True, [3, 1, 2]), (2, 2, False, None), (1, 2, False, "drawn"), (0, 0, True, "drawn"),
    (2, 0, False, {"no such host": 2})])
def test_a_rank_is_killed_in_the_middle_of_an_epoch(tmp_path: Path, victim: int, workers: int, late: bool,
                                                    shares: Any) -> None:
    """The last body of an epoch has 2 rows: fewer than ranks, and then one each."""
    with ElasticJob(train, str(tmp_path), 5, (6,), workers, late, EPOCHS, -1, shares, slots={"a": 3}, min_np=2,
                    hosts_are_fixed=True, imported=TORCH) as job:
        for member in range(3):
            job.until_printed(member, "body 6 in 3")
        job.kill(victim)
        (tmp_path / "gate.6").touch()
        results = job.finish()
        assert ("have no number for ranks [0, 1, 2]" in job.output(0)) == isinstance(shares, dict)
    told = judge(results)
    assert len(told["ledger"]) == EPOCHS * 5
    if shares == [3, 1, 2]:
        assert results[0]["rows"] == [3] * 4 + [2] + [3] * 2 + [4] * 2 + [1] + ([4] * 4 + [1])
    assert told["sizes"] == [3] * (6 + late) + [2] * (9 - late), "no finished step is made again"
    assert all(len(result["loaders"]) == (workers or 1) for result in results.values()), "workers live on"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_is_lost_between_two_epochs(tmp_path: Path, victim: int) -> None:
    with ElasticJob(train, str(tmp_path), 5, (), 0, False, EPOCHS, victim, slots={"a": 3}, min_np=2, hosts_are_fixed=True,
                    imported=TORCH) as job:
        told = judge(job.finish())
    assert told["sizes"] == [3] * 5 + [2] * 10, "no finished step is made again"


@pytest.mark.parametrize("shares", [None, "auto", "drawn"])
def test_ranks_come_and_go(tmp_path: Path, shares: str | None) -> None:
    with ElasticJob(train, str(tmp_path), 5, (), 0, False, 10**6, -1, shares, slots={"a": 2}, min_np=1,
                    imported=TORCH) as job:
        job.until_printed(1, "body 3 in 2")
        job.see({"a": 3})
        job.until_printed(2, "in 3")
        job.see({"a": 2})
        job.until(lambda: job.processes[2].poll() == 0)
        (tmp_path / "end").touch()
        results = job.finish()
    told = judge(results)
    assert [size for size, _ in itertools.groupby(told["sizes"])] == [2, 3, 2]


def test_the_batch_grows_with_the_world(tmp_path: Path) -> None:
    with ElasticJob(train, str(tmp_path), "scale", (), 0, False, 10**6, slots={"a": 1}, min_np=1, imported=TORCH) as job:
        job.until_printed(0, "body 3 in 1")
        job.see({"a": 2})
        job.until_printed(1, "in 2")
        job.until(lambda: job.output(1).count(" in 2") > 9)  # more than an epoch
        (tmp_path / "end").touch()
        told = agreed(job.finish())
    assert told["scaled"] == [4, 8] and set(told["sizes"]) == {1, 2}
    assert max(len(rows) for _, *rows in told["ledger"]) == 8
    for epoch in range(told["ledger"][-1][0]):
        assert sorted(samples(told["ledger"], epoch)) == list(range(SAMPLES))


def test_gradients_have_their_weight_after_a_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives a cast parameter another node, and equal weights are not set again."""
    monkeypatch.setattr(api, "runtime", lambda: None)
    model = torch.nn.Linear(2, 1, bias=False)
    weight = body_loader._Weight(SimpleNamespace(_handlers={"model": SimpleNamespace(value=model)}))  # type: ignore[arg-type]
    for cast in (model.float, model.double, model.float):
        cast()
        model.zero_grad()
        weight.set(0.5)
        model(torch.ones(1, 2, dtype=model.weight.dtype)).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.tolist() == [[0.5, 0.5]]
