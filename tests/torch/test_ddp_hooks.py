"""Communication hooks beside torch's own over Gloo: DDP's hooks through the adapter, and hooks of the same algorithm."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite import api  # noqa: E402
from hvdlite.core.errors import UnsupportedError  # noqa: E402
from hvdlite.runtime.runtime import Runtime  # noqa: E402
from hvdlite_torch import comm_hooks  # noqa: E402
from hvdlite_torch.optimizer.distributed_optimizer import wrap_optimizer  # noqa: E402
from tests.torch.programs import ddp_hooks as programs  # noqa: E402
from tests.worlds import TORCH, processes, threads  # noqa: E402


def test_hooks_train_like_ddps_own(tmp_path: Any) -> None:
    processes(2, programs.hooks_train_like_ddps_own, str(tmp_path), timeout=180, imported=TORCH)


def test_an_adapted_hook_sees_buckets_that_stay_the_same() -> None:
    """A parameter that no rank has in a step is zeros in its bucket; one that comes later gets a bucket of its own."""
    def step(runtime: Runtime) -> None:
        seen: list[Any] = []

        def average(state: str, bucket: Any) -> Any:
            assert state == "state"
            seen.append((bucket.index(), bucket.is_last(), [parameter.shape[0] for parameter in bucket.parameters()],
                         bucket.buffer().tolist(), [gradient.tolist() for gradient in bucket.gradients()]))
            future: Any = torch.futures.Future()
            future.set_result([bucket.buffer() * 2])
            return future
        a, b, c = (torch.nn.Parameter(torch.ones(length)) for length in (1, 2, 3))
        optimizer = wrap_optimizer(torch.optim.SGD([a, b, c], lr=0.1), runtime=runtime,
                                   comm_hook=comm_hooks.DDPHook("state", average))
        for used in ((a, b), (b,), (a, b, c)):
            seen.clear()
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in used).backward()
            for parameter in (a, b, c):
                if any(parameter is each for each in used):
                    assert (parameter.grad == 2).all()
                else:
                    assert parameter.grad is None
            optimizer.step()
            has_a = float(any(a is each for each in used))
            expected = [(0, len(used) < 3, [2, 1], [1, 1, has_a], [[1, 1], [has_a]])]
            if len(used) == 3:
                expected.append((1, True, [3], [1, 1, 1], [[1, 1, 1]]))
            assert seen == expected
        optimizer = wrap_optimizer(torch.optim.SGD([a], lr=0.1), runtime=runtime,
                                   comm_hook=comm_hooks.DDPHook(None, lambda state, bucket: "nothing"))
        with pytest.raises(TypeError, match=r"must return a torch.futures.Future.*it returned 'nothing'"):
            a.sum().backward()
    threads(2, step)


def test_an_elastic_job_has_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "is_elastic", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def step(runtime: Runtime) -> None:
        a = torch.nn.Parameter(torch.ones(1))
        optimizer = wrap_optimizer(torch.optim.SGD([a], lr=0.1), runtime=runtime,
                                   comm_hook=comm_hooks.DDPHook(None, lambda state, bucket: None))
        with pytest.raises(UnsupportedError, match=r"DDPHook does not work in an elastic job.*Use comm_hooks.PowerSGD"):
            a.sum().backward()
        assert optimizer
    threads(2, step)


def test_a_rank_that_has_joined_has_no_part_in_a_hooks_collectives() -> None:
    def step(runtime: Runtime) -> None:
        a = torch.nn.Parameter(torch.ones(1))
        optimizer = wrap_optimizer(torch.optim.SGD([a], lr=0.1), runtime=runtime,
                                   comm_hook=comm_hooks.DDPHook(None, lambda state, bucket: bucket.buffer()))
        with optimizer.join():
            a.sum().backward()
            optimizer.step()
            if runtime.world.rank:
                optimizer.zero_grad()
                with pytest.raises(UnsupportedError, match=r"does not work with join.*1 of 2 ranks have joined.*PowerSGD"):
                    a.sum().backward()
    threads(2, step)
