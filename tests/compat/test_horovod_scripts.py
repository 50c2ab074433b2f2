"""Scripts as one writes them for Horovod run without a change, under `hvdrun --horovod-compat`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.worlds import ROOT

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAINING = """
    import argparse
    import torch
    import torch.nn.functional as F
    import horovod.torch as hvd

    parser = argparse.ArgumentParser()
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    data = torch.utils.data.TensorDataset(torch.randn(512, 20), torch.randint(0, 3, (512,)))
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(data, batch_size=32, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    lr_scaler = hvd.size() if not args.use_adasum else 1
    if args.use_adasum and hvd.nccl_built():
        lr_scaler = hvd.local_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression,
                                         op=hvd.Adasum if args.use_adasum else hvd.Average,
                                         gradient_predivide_factor=args.gradient_predivide_factor)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)

    def metric_average(value, name):
        return hvd.allreduce(torch.tensor(value), name=name).item()

    for epoch in range(3):
        model.train()
        sampler.set_epoch(epoch)
        for batch_idx, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()
        average = metric_average(loss.item(), "avg_loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {average:.3f}")
    digest = hvd.allgather_object(sum(float(p.sum()) for p in model.parameters()))
    assert len(digest) == hvd.size() and max(digest) - min(digest) < 1e-6, digest
    print("done")
"""

SYNTHETIC = """
    import timeit
    import numpy as np
    import torch
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), groups=2,
                                         backward_passes_per_step=2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data, target = torch.randn(32, 64), torch.randn(32, 64)

    def benchmark_step():
        optimizer.zero_grad()
        for _ in range(2):
            torch.nn.functional.mse_loss(model(data), target).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    timeit.timeit(benchmark_step, number=2)
    rates = [32 * 5 / timeit.timeit(benchmark_step, number=5) for _ in range(3)]
    mean, conf = np.mean(rates), 1.96 * np.std(rates)
    if hvd.rank() == 0:
        print("Total img/sec on %d ranks: %.1f +-%.1f" % (hvd.size(), hvd.size() * mean, hvd.size() * conf))
    print("done")
"""

TENSORFLOW = """
    import tensorflow as tf
    import keras
    import horovod.tensorflow as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.tensorflow import mpi_ops
    from horovod.tensorflow.compression import Compression
    from horovod.tensorflow.functions import allgather_object, broadcast_object, broadcast_variables
    from horovod.tensorflow.mpi_ops import Average, Sum, allreduce, rank, rank_op, size, size_op
    from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

    hvd.init()
    assert mpi_ops is hvd and Compression is hvd.Compression and SyncBatchNormalization is hvd.SyncBatchNormalization
    assert SyncBatchNormalization(fused=False)(tf.ones((2, 3)), training=True).shape == (2, 3)
    assert float(allreduce(tf.constant(1.0), op=Sum)) == size() == int(size_op())
    keras.utils.set_random_seed(hvd.rank())
    x, y = tf.random.normal((64, 5)), tf.random.uniform((64,), maxval=3, dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(64).batch(16)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    opt = keras.optimizers.Adam(0.001 * hvd.size())

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            loss_value = loss(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))
        return loss_value

    for batch, (images, labels) in enumerate(dataset.take(20 // hvd.size())):
        loss_value = training_step(images, labels, batch == 0)
        if batch == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
    sums = hvd.allgather_object(sum(float(tf.reduce_sum(v.value)) for v in model.trainable_variables))
    assert abs(sums[0] - sums[1]) < 1e-5, sums

    layer = model.layers[0]
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(model(tf.fill((2, 5), 1.0 + hvd.rank())))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    variables = [variable.value for variable in model.trainable_variables]
    mine = hvd.allgather_object([gradient.numpy().tolist() for gradient in tape.gradient(value, variables)])
    assert mine[0][2] == mine[1][2]
    print("done")
"""

KERAS = """
    import keras
    import numpy as np
    import horovod.keras as hvd

    hvd.init()
    x, y = np.random.rand(128, 7).astype("float32"), np.random.rand(128, 1).astype("float32")
    model = keras.Sequential([keras.Input((7,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    opt = hvd.DistributedOptimizer(keras.optimizers.Adadelta(1.0 * hvd.size()))
    model.compile(loss="mse", optimizer=opt, metrics=["mae"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=1.0 * hvd.size(), warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(initial_lr=1.0 * hvd.size(), multiplier=1e-1, start_epoch=2),
    ]
    model.fit(x, y, batch_size=16, callbacks=callbacks, epochs=3, verbose=1 if hvd.rank() == 0 else 0)
    score = hvd.allreduce(model.evaluate(x, y, verbose=0)[0])
    assert hvd.allgather([float(score)]).shape == (2,)
    print("done")
"""

SETS_AND_SAMPLERS = """
    import torch
    import horovod.torch as hvd
    from horovod.torch.elastic import ElasticSampler
    from horovod.common.util import env, split_list, num_rank_is_power_2, is_version_greater_equal_than
    from horovod.common.exceptions import HorovodInternalError
    from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
    import horovod.torch.mpi_ops

    even, odd = hvd.ProcessSet([0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[even, odd])
    mine = even if hvd.rank() % 2 == 0 else odd
    assert hvd.allreduce(torch.ones(3) * hvd.rank(), process_set=mine).tolist() == [hvd.rank()] * 3
    assert horovod.torch.mpi_ops.is_homogeneous()
    assert hvd.remove_process_set(odd) and odd.process_set_id is None
    assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and num_rank_is_power_2(4) and not num_rank_is_power_2(6)
    assert is_version_greater_equal_than(torch.__version__, "2.0.0")

    model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), hvd.SyncBatchNorm(4), torch.nn.Flatten(), torch.nn.LazyLinear(2))
    dataset = torch.utils.data.TensorDataset(torch.randn(50, 1, 6, 6))
    sampler = ElasticSampler(dataset, shuffle=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, sampler=sampler)
    model(dataset[0][0][None])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index, (x,) in enumerate(loader):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            sampler.record_batch(index, 5)
        assert sampler.processed_num == 50
    seen = hvd.allgather(torch.tensor(list(ElasticSampler(dataset, seed=3)))).tolist()
    assert sorted(seen) == list(range(50))
    half = ElasticSampler(dataset)
    half.load_state_dict({"epoch": 0, "processed_num": 20})
    assert len(half) == 15 and len(set(hvd.allgather(torch.tensor(list(half))).tolist())) == 30

    class Numbers(BaseDataLoader):
        def __len__(self):
            return 4
        def _iterate(self):
            yield from range(4)

    class Ahead(AsyncDataLoaderMixin, Numbers):
        def _process_batch(self, batch):
            return batch * 10

    ahead = Ahead(async_loader_queue_size=2)
    assert list(ahead) == [0, 10, 20, 30] == list(ahead)
    for _ in ahead:
        break
    ahead.close_async_loader()
    try:
        hvd.allreduce(torch.ones(hvd.rank() + 1), name="uneven")
    except HorovodInternalError as error:
        assert "uneven" in str(error)
    else:
        raise SystemExit("no error")
    finish = hvd.sparse_allreduce_async(torch.eye(3).to_sparse() * (hvd.rank() + 1), name="s", op=hvd.Sum)
    assert finish().to_dense().diagonal().tolist() == [3, 3, 3]
    assert hvd.join() in (0, 1)
    print("done")
"""


def run(tmp_path: Path, script: str, *arguments: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(script))
    result = subprocess.run([sys.executable, "-m", "hvdlite_runner.cli", "-np", "2", "--horovod-compat", "--no-prefix",
                             sys.executable, str(path), *arguments],
                            capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0 and result.stdout.count("done") == 2, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("flags", [[], ["--use-adasum"], ["--fp16-allreduce", "--gradient-predivide-factor", "2"]])
def test_training(tmp_path: Path, flags: list[str]) -> None:
    losses = [float(line.split()[-1]) for line in run(tmp_path, TRAINING, *flags).splitlines() if line.startswith("epoch")]
    assert len(losses) == 3


def test_the_synthetic_benchmark(tmp_path: Path) -> None:
    assert "Total img/sec on 2 ranks" in run(tmp_path, SYNTHETIC)


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.parametrize("script", [TENSORFLOW, KERAS], ids=["tape", "keras"])
def test_tensorflow_and_keras(tmp_path: Path, script: str) -> None:
    run(tmp_path, script)


def test_process_sets_samplers_loaders_and_helpers(tmp_path: Path) -> None:
    run(tmp_path, SETS_AND_SAMPLERS)


def test_the_names_are_the_same_modules() -> None:
    subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import hvdlite.horovod_compat, importlib
        import horovod, horovod.torch, hvdlite_torch, hvdlite
        assert horovod.torch is hvdlite_torch and hvdlite_torch.__spec__.name == "hvdlite_torch"
        from horovod import torch as frontend
        from horovod.torch import functions, mpi_ops, sync_batch_norm
        assert frontend is functions is mpi_ops is hvdlite_torch and sync_batch_norm is hvdlite_torch.sync_batch_norm
        assert importlib.import_module("horovod.common.process_sets").ProcessSet is hvdlite.ProcessSet
        try:
            import horovod.mxnet
        except ImportError as error:
            assert "horovod.mxnet" in str(error)
        else:
            raise SystemExit("there is no frontend for MXNet")
    """)], check=True, cwd=ROOT)
