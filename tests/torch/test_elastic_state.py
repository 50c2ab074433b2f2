"""`TorchState`: commits go back bit by bit and reuse memory; what fails changes nothing; one broadcast synchronises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.core.errors import UnsupportedError  # noqa: E402
from hvdlite_torch.elastic import StateHandler, TorchState, get_handler_registry, set_handler_registry  # noqa: E402
from tests.torch.elastic_training import OPTIMIZERS, Training, network  # noqa: E402


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_from_a_commit_gives_the_same_bits_each_time(kind: str) -> None:
    training = Training(kind)
    state = training.state()
    training.train(0, 3)
    state.step = 3
    state.commit()
    committed = training.bits()
    training.train(3, 6)
    trained = training.bits()
    assert trained != committed
    for _ in range(2):  # training on what was restored does not change the commit
        state.restore()
        assert training.bits() == committed and state.step == 3
        training.train(3, 6)
        assert training.bits() == trained


def test_state_that_an_optimizer_has_only_later_is_gone_after_restore() -> None:
    training = Training("adam")
    state = training.state()
    begin = training.bits()
    training.train(0, 2)
    state.restore()
    assert training.bits() == begin and not training.optimizer.state


def test_commits_reuse_their_memory() -> None:
    training = Training("adam")
    state = training.state()
    training.train(0, 1)
    places = []
    for step in range(1, 7):
        state.commit()
        training.train(step, step + 1)
        handlers = [vars(state)["_handlers"][name] for name in ("model", "optimizer")]
        places.append({tensor.data_ptr() for handler in handlers for tensor in torch.utils._pytree.tree_leaves(
            [dict(handler.saved), dict(handler.staged)]) if isinstance(tensor, torch.Tensor)})
    assert places[2] == places[3] == places[4] == places[5]


def test_a_commit_that_fails_leaves_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("adam")
    state = training.state()
    training.train(0, 2)
    state.step = 2
    state.commit()
    committed = training.bits()
    training.train(2, 3)
    state.step = 3

    def refuse() -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(training.schedule, "state_dict", refuse)
    with pytest.raises(MemoryError):
        state.commit()  # the model and the optimizer were copied already
    monkeypatch.undo()
    state.restore()
    assert training.bits() == committed and (state.step, state._commits) == (2, 1)


def test_several_models_scalers_and_later_assignments() -> None:
    generator, critic = Training("sgd"), Training("adam", seed=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = TorchState(generator=generator.model, critic=critic.model, first=generator.optimizer, second=critic.optimizer,
                       scaler=scaler, mask=torch.ones(3))
    state.model = network(5)  # None until now
    assert isinstance(state.model, torch.nn.Module) and state.optimizer is None
    state.commit()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    before = [training.bits() for training in (generator, critic)]
    for training in (generator, critic):
        training.train(0, 2)
    with torch.no_grad():
        state.mask.zero_()
        state.model[0].weight.zero_()
    state.restore()
    assert scaler.state_dict()["scale"] == 8.0 and state.mask.tolist() == [1, 1, 1]
    assert [training.bits()[:9] for training in (generator, critic)] == [bits[:9] for bits in before]
    assert state.model[0].weight.abs().sum() > 0
    state.model = network(6)
    assert torch.equal(state.model[0].weight, network(6)[0].weight), "a new model is saved at once"
    state.restore()
    assert torch.equal(state.model[0].weight, network(6)[0].weight)


def test_what_cannot_be_copied_or_pickled_is_named() -> None:
    class Locked(torch.nn.Module):
        def get_extra_state(self) -> Any:
            return threading.Lock()

    with pytest.raises(UnsupportedError, match="attribute 'model' of the elastic state cannot be copied: it is a Locked"):
        TorchState(Locked())
    with pytest.raises(UnsupportedError, match="attribute 'source' of the elastic state cannot be pickled: it is a gen"):
        TorchState(network(), source=(number for number in range(3)))


def test_handlers_of_ones_own() -> None:
    class Counter:
        value = 0

    class CounterHandler(StateHandler):
        def __init__(self, value: Any) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.saved = self.value.value

        def restore(self) -> None:
            self.value.value = self.saved

    before = get_handler_registry()
    set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        counter = Counter()
        state = TorchState(counter=counter)
        counter.value = 1
        state.commit()
        counter.value = 2
        state.restore()
        assert state.counter is counter and counter.value == 1
    finally:
        set_handler_registry(before)
