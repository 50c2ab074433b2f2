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
from tests.gpu_double.cupy import on_gpu
from tests.gpu_double.worlds import Gpus
from tests.runtime.test_gpu_arrays import gpus as gpus


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
        assert (hvd.allreduce(tf.fill([2], tf.constant(rank + 1, tf.bfloat16)), op=hvd.Sum).numpy() == 3).all()
        rows = hvd.allgather(tf.fill([rank + 1], tf.constant(rank, tf.bfloat16)))
        assert rows.dtype is tf.bfloat16 and rows.numpy().tolist() == [0, 1, 1]
        # int16 is not reduced by NCCL: over the host's memory.
        assert (hvd.allreduce(tf.fill([2], tf.constant(rank + 1, tf.int16)), op=hvd.Sum).numpy() == 3).all()
    worlds.threads(2, step)
    assert waits and {"allReduce", "broadcast"} <= set(gpus.made[0].launches)


def test_functions_of_host_arrays_get_them(gpus: Any, tf: Any, waits: list[int]) -> None:
    """Keras' layers and optimizers exchange small values by functions of NumPy arrays."""
    from hvdlite_tf.keras.backends.tensorflow import call
    (doubled,) = call(lambda arrays: [np.multiply(arrays[0], 2)], [x := tf.fill([3], 2.0)], [x])
    assert doubled.numpy().tolist() == [4, 4, 4] and not waits


def test_results_are_kept_until_a_wait_that_begins_after_their_last_use(gpus: Any, tf: Any, waits: list[int],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdlite_tf import gpu
    results, alive, tensors = gpu._Results(), [], []
    monkeypatch.setattr(gpu, "_results", results)
    monkeypatch.setattr(gpu, "synchronise", lambda: alive.append(len(results._arrays)))
    monkeypatch.setattr(gpu, "tensor_of", lambda array: tensors.append(array) or tf.constant(np.asarray(array)))

    def step(runtime: Runtime) -> None:
        gpus.current.runtime = runtime
        for _ in range(3):
            hvd.allreduce(tf.fill([3], 1.0), op=hvd.Sum)
        assert alive == [0, 1, 2] and len(results._arrays) == 3, "tensors use them"
        tensors.clear()
        hvd.allreduce(tf.fill([3], 1.0), op=hvd.Sum)
        assert alive[-1] == 3 and len(results._arrays) == 1, "the GPU could still read them when the wait began"
    worlds.threads(1, step)


@pytest.fixture
def seen(gpus: Any, tf: Any, waits: list[int], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let TensorFlow see a GPU; return where the runtime is to be set that all threads have, TensorFlow's too."""
    from hvdlite_tf import gpu
    visible = tf.config.get_visible_devices
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None: [types.SimpleNamespace(name="GPU:0")]
                        if kind == "GPU" else visible(kind))
    monkeypatch.setattr(gpu, "_check_memory", lambda: None)
    shared = types.SimpleNamespace(runtime=None)
    monkeypatch.setattr(api.worlds(), "current", lambda: shared.runtime)
    return shared


def python_calls(function: Any, *inputs: Any) -> list[str]:
    """Return the operations by which a graph calls Python."""
    return [each.type for each in function.get_concrete_function(*inputs).graph.get_operations() if "PyFunc" in each.type]


def test_collectives_in_a_graph_stay_on_the_gpu(gpus: Any, tf: Any, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(runtime: Runtime) -> None:
        seen.runtime = runtime

        @tf.function
        def several(x: Any) -> Any:
            half, wide = tf.cast(x, tf.bfloat16), tf.cast(x, tf.float64)
            return (hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(half), hvd.grouped_allreduce([x, wide], op=hvd.Max),
                    hvd.allgather(x), hvd.broadcast(half, 0), hvd.reducescatter(x, op=hvd.Sum), hvd.alltoall(x))
        x = tf.reshape(tf.range(6.0), [3, 2])
        for each in tf.nest.flatten(several(x)):
            assert each.shape == (3, 2) and (tf.cast(each, tf.float32).numpy() == x.numpy()).all()
        assert python_calls(several, x) == ["EagerPyFunc"] * 7

        @tf.function
        def on_the_host(x: Any) -> Any:
            received, counts = hvd.alltoall(x, tf.constant([3]))  # the counts are for the host
            return received, counts, hvd.allreduce(tf.cast(x, tf.int16), op=hvd.Sum), hvd.size_op()
        assert (on_the_host(x)[0].numpy() == x.numpy()).all()
        assert set(python_calls(on_the_host, x)) == {"PyFunc"}
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
        assert python_calls(tf.function(lambda x: hvd.allreduce(x)), x) == ["PyFunc"], "there is no GPU"
    worlds.threads(1, step)
    assert {"allReduce", "broadcast"} <= set(gpus.made[0].launches)


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_gradients_in_a_graph_go_together_and_stay_on_the_gpu(gpus: Any, tf: Any, seen: Any, compression: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdlite.training.step_reducer import weighing
    from hvdlite_tf.gradients import TensorFlowStepReducer
    monkeypatch.setattr(TensorFlowStepReducer, "is_shared", True)

    def step(runtime: Runtime) -> None:
        seen.runtime = runtime
        kernel, bias, unused = (tf.Variable(tf.ones(shape)) for shape in ([2, 3], [3], [1]))
        half = tf.Variable(tf.ones([3], tf.float16))

        @tf.function
        def gradients(x: Any) -> Any:
            with hvd.DistributedGradientTape(tf.GradientTape(), compression=getattr(hvd.Compression, compression)) as tape:
                y = (x @ kernel + bias) * tf.cast(half, tf.float32)
                loss = tf.reduce_sum(y * y)
            return [each for each in tape.gradient(loss, [kernel, bias, unused, half]) if each is not None]
        x = tf.constant([[1.0, 2.0]])
        for _ in range(2):
            found = gradients(x)
            assert [each.dtype for each in found] == [tf.float32, tf.float32, tf.float16]
            assert [each.numpy().ravel().tolist() for each in found] == [[8] * 3 + [16] * 3, [8] * 3, [32] * 3]
        assert python_calls(gradients, x) == ["EagerPyFunc"]

        @tf.function
        def weighted(samples: Any) -> Any:
            with weighing(samples), hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(kernel * kernel)
            return tape.gradient(loss, [kernel])
        assert (weighted(tf.constant(4.0))[0].numpy() == 2).all()
        assert (weighted(tf.constant(2.0))[0].numpy() == 2).all(), "the only rank's weight cancels"
    worlds.threads(1, step)
    assert "allReduce" in gpus.made[0].launches


def test_gradients_that_go_together_are_weighted(gpus: Any, tf: Any, waits: list[int]) -> None:
    from hvdlite_tf.gradients import TensorFlowStepReducer

    def step(runtime: Runtime) -> None:
        gpus.current.runtime = runtime
        rank = runtime.world.rank
        for op, divisor in ((hvd.Average, 2.0), (hvd.Sum, 1.0)):
            reducer = TensorFlowStepReducer(compression=hvd.Compression.none, op=op)
            given = [tf.fill([3], rank + 1.0), tf.fill([2], tf.constant(rank + 1, tf.bfloat16)), tf.fill([1], rank + 3.0)]
            assert [each.numpy()[0] for each in reducer._reduce_together(given, None)] == [
                3 / divisor, 3 / divisor, 7 / divisor]
            # Rank 1 has three times as many samples: (1 + 3 * 2) / 4 in the mean, twice that in the sum.
            weighted = reducer._reduce_together(given, 2.0 * (1 + 2 * rank))
            np.testing.assert_allclose(np.array([float(each[0]) for each in weighted]),
                                       np.array([1.75, 1.75, 3.75]) * 2 / divisor, rtol=1e-2)
            assert [each.dtype for each in weighted] == [each.dtype for each in given]
    worlds.threads(2, step)


def test_fit_keeps_gradients_on_the_gpu(gpus: Any, tf: Any, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras is on another backend here")
    import hvdlite_tf.keras as hvd_keras
    from hvdlite_tf.gradients import TensorFlowStepReducer
    monkeypatch.setattr(TensorFlowStepReducer, "is_shared", True)
    counts: list[int] = []
    real = TensorFlowStepReducer._reduce_together
    monkeypatch.setattr(TensorFlowStepReducer, "_reduce_together", lambda self, gradients, samples: counts.append(
        len(gradients)) or real(self, gradients, samples))

    def step(runtime: Runtime) -> None:
        seen.runtime = runtime
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        before = [each.copy() for each in model.get_weights()]
        model.fit(np.ones((4, 2), np.float32), np.ones((4, 1), np.float32), batch_size=2, epochs=2, verbose=0)
        assert any((one != other).any() for one, other in zip(before, model.get_weights(), strict=True))
    worlds.threads(1, step)
    assert counts == [4] * 4, "all gradients of a step in one call"
