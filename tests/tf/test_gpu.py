"""TensorFlow's tensors the way of DLPack, with doubles of CuPy and of the GPU: who waits, and what goes which way."""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvdlite_tf as hvd
from hvdlite import api
from hvdlite.runtime.runtime import Runtime
from tests import worlds
from tests.device_double import Gpus
from tests.runtime.test_gpu_arrays import gpus as gpus
from tests.runtime.test_gpu_arrays import on_gpu


def test_tensorflow_numbers_only_the_gpus_that_it_sees(tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")`, as every Horovod script says."""
    from hvdlite_tf import gpu
    seen = [types.SimpleNamespace(name=f"/physical_device:GPU:{index}") for index in (3,)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: seen)
    tensor = types.SimpleNamespace(backing_device="/job:localhost/replica:0/task:0/device:GPU:0")
    assert gpu.tf_index(tensor) == 0 and gpu.cuda_index(tensor) == 3
    assert gpu._Exported(tensor).__dlpack_device__() == (2, 3), "CuPy makes that GPU its current one for a while"
    second = types.SimpleNamespace(backing_device="/job:localhost/replica:0/task:0/device:GPU:1")
    assert gpu.cuda_index(second) == 3, "one GPU, divided"
    seen.append(types.SimpleNamespace(name="/physical_device:GPU:5"))
    assert gpu.cuda_index(second) == 5


def test_memory_that_tensorflow_takes_is_told_once(tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdlite_tf import gpu
    seen = [types.SimpleNamespace(name=f"GPU:{index}") for index in range(3)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: seen)
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda device: device is seen[0])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration",
                        lambda device: [types.SimpleNamespace(memory_limit=1000)] if device is seen[1] else None)
    gpu._check_memory.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"takes nearly all memory of GPU:2 .*set_memory_growth"):
        gpu._check_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpu._check_memory()
    gpu._check_memory.cache_clear()


def test_results_are_handed_over_by_the_dlpack_protocol(tf: Any) -> None:
    from hvdlite_tf import gpu

    class Array:
        """Stands for CuPy's, over the host's memory."""

        def __dlpack__(self, *, stream: int) -> Any:
            assert stream == -1, "the host has waited"
            return np.arange(3.0).__dlpack__()
    assert gpu.tensor_of(Array()).numpy().tolist() == [0, 1, 2]


def test_a_strategy_takes_memory_of_its_ranks_gpu_only(tf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdlite_tf.keras.tf_strategy import own_device
    pinned: list[Any] = []
    gpus = [types.SimpleNamespace(name=f"/device:GPU:{index}") for index in range(4)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: pinned.append(device))
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: pytest.fail("this takes memory of all GPUs"))
    assert own_device(5) == "/device:GPU:0" and pinned == [gpus[1]]

    def refuse(*_: Any) -> None:
        raise RuntimeError("Visible devices cannot be modified after being initialized")
    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    assert own_device(5) == "/device:GPU:1", "TensorFlow has taken all of them already"
    del gpus[1:]
    assert own_device(5) == "/device:GPU:0"
    gpus.clear()
    assert own_device(5) == "/device:CPU:0"


def test_arrays_are_renumbered_without_a_copy() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    from hvdlite_tf import gpu
    memory = cupy.cuda.UnownedMemory(4096, 24, None, 0)
    array = cupy.ndarray((2, 3), cupy.float32, cupy.cuda.MemoryPointer(memory, 0))
    there = gpu.with_device_index(array, 3)
    assert (there.device.id, there.data.ptr, there.shape, there.dtype) == (3, 4096, (2, 3), array.dtype)
    assert gpu.with_device_index(array, 0) is array


@pytest.fixture
def tf() -> Any:
    """TensorFlow, imported by the one test process that needs it: all of them collect this file."""
    return importlib.import_module("tensorflow")


@pytest.fixture
def waits(gpus: Gpus, tf: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    from hvdlite_tf import gpu
    counted: list[int] = []
    monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: isinstance(tensor, tf.Tensor))
    monkeypatch.setattr(gpu, "as_cupy", lambda tensor: on_gpu(tensor.numpy()))
    monkeypatch.setattr(gpu, "tensor_of", lambda array: tf.constant(np.asarray(array)))
    monkeypatch.setattr(gpu, "synchronise", lambda: counted.append(1))
    yield counted


def test_eager_collectives_wait_for_tensorflow_and_for_nccl(gpus: Any, tf: Any, waits: list[int]) -> None:
    def step(runtime: Runtime) -> None:
        gpus.current.runtime = runtime
        rank = runtime.world.rank
        assert api.runtime() is runtime
        ones = tf.fill([3, 2], rank + 1.0)
        assert (hvd.allreduce(ones, op=hvd.Sum).numpy() == 3).all()
        both = hvd.grouped_allreduce([ones, tf.constant([rank])], op=hvd.Sum)
        assert (both[0].numpy() == 3).all() and both[1].numpy().tolist() == [1]
        assert hvd.allgather(tf.fill([rank + 1], rank)).numpy().tolist() == [0, 1, 1]
        assert (hvd.broadcast(ones, 1).numpy() == 2).all()
        assert hvd.reducescatter(tf.constant([1.0, 2.0]), op=hvd.Sum).numpy().tolist() == [2.0 * (rank + 1)]
        assert hvd.alltoall(tf.constant([10 * rank, 10 * rank + 1])).numpy().tolist() == [rank, 10 + rank]
        received, rows = hvd.alltoall(tf.range(3), tf.constant([1, 2]))
        assert rows.numpy().tolist() == [1 + rank] * 2 and len(received) == 2 * (1 + rank)
        # bfloat16 is not exchanged, int16 not reduced: over the host's memory.
        assert (hvd.allreduce(tf.fill([2], tf.constant(rank + 1, tf.bfloat16)), op=hvd.Sum).numpy() == 3).all()
        assert (hvd.allreduce(tf.fill([2], tf.constant(rank + 1, tf.int16)), op=hvd.Sum).numpy() == 3).all()
    worlds.threads(2, step)
    assert waits and {"allReduce", "broadcast"} <= set(gpus.made[0].launches)
