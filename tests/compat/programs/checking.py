"""Programs of test_check.py."""

from __future__ import annotations

import textwrap
from pathlib import Path

HERE = Path(__file__).parent


def _told(source: str) -> dict[tuple[int, str], tuple[str, str]]:
    """Return what is found in a script: line and name, effect and reason."""
    from hvdlite.horovod_compat.check import check
    found = check(textwrap.dedent(source).lstrip("\n"))
    return {(each.line, each.what): (str(each.effect), each.why) for each in found}


def names_arguments_and_variables_are_looked_up() -> None:
    assert _told("""
        import os
        import horovod.torch as hvd
        from horovod.torch import Compression, no_such_name
        import horovod.mxnet
        os.environ["HOROVOD_CYCLE_TIME"] = os.environ["HOROVOD_FUSION_THRESHOLD"] = os.environ["HOROVOD_RANK"]
        hvd.allreduce(tensor, nam="x", op=hvd.Sum)
        hvd.allreduce(*tensors, **options)
        hvd.broadcast_optimizer_state(optimizer, 0, model=model)
        Compression.fp8, Compression.fp16, hvd.mpi_ops, hvd.elastic.TorchState
        optimizer = hvd.DistributedOptimizer(optimizer)
        with optimizer.skip_synchronize():
            optimizer.step(), other.skip_synchronize()
        try:
            from horovod.torch import another_name
        except ImportError:
            pass
        def train(horovod_of_another_kind):
            return horovod_of_another_kind.allreduce(nam="x")
    """) == {
        (3, "horovod.torch.no_such_name"): ("fails", "horovod.torch of hvdlite has no no_such_name"),
        (4, "horovod.mxnet"): ("fails", "horovod of hvdlite has no mxnet"),
        (5, "HOROVOD_CYCLE_TIME"): ("has no effect", "hvdlite neither reads nor sets this variable"),
        (6, "horovod.torch.allreduce()"): ("fails", "got an unexpected keyword argument 'nam'"),
        (8, "horovod.torch.broadcast_optimizer_state"): (
            "differs", "makes no optimizer step to create the state; LBFGS works, too"),
        (8, "horovod.torch.broadcast_optimizer_state(model=)"): ("has no effect", "not needed"),
        (9, "horovod.torch.Compression.fp8"): ("fails", "horovod.torch.Compression of hvdlite has no fp8"),
        (10, "horovod.torch.DistributedOptimizer"): (
            "differs", "returns the optimizer itself, with its state, defaults and hooks"),
        (11, "optimizer.skip_synchronize()"): (
            "differs", "is not needed: gradients that were reduced are not reduced again"),
    }


def names_mean_what_their_scope_says() -> None:
    """Every line with `odd=` is right or wrong by what its name means there."""
    told = _told("""
        import horovod.torch as hvd
        def argument(hvd):
            hvd.rank(odd=3)
            import horovod.torch as local
            local.rank(odd=5)
        local.rank(odd=6)
        for_all = lambda hvd: hvd.rank(odd=7)
        found = [hvd.rank(odd=8) for hvd in ranks]
        found += [hvd.rank(odd=9)]
        def loops():
            for index, (hvd, *rest) in enumerate(ranks):
                hvd.rank(odd=12)
        class Model:
            hvd: object = other
            hvd.rank(odd=15)
        with open(hvd.rank(odd=16)) as opened:
            hvd.rank(odd=17)
        try:
            import horovod.torch as tried
        except ImportError:
            tried = None
        tried.rank(odd=22)
        try:
            from horovod.torch import no_such_name as older
        except ImportError:
            older = None
        older(odd=27)
        if condition:
            import horovod.torch as one, numpy as other
        if condition:
            import horovod.torch as two
        else:
            import horovod.tensorflow as two
        one.rank(odd=34), two.rank(odd=34)
        import numpy as one
        one.rank(odd=36)
        first, hvd = 1, 2
        hvd.rank(odd=38)
    """)
    assert all(what == "horovod.torch.rank()" and "'odd'" in why for (_, what), (_, why) in told.items()), told
    assert {line for line, _ in told} == {5, 9, 16, 17, 22, 34}, told


def conditions_that_ask_for_a_name_guard_it() -> None:
    """Under a condition with `hasattr(...)` nothing fails; elsewhere all is looked up."""
    told = _told("""
        import horovod.torch as hvd
        if hasattr(hvd, "no_such_name"):
            hvd.no_such_name()
        elif not hasattr(hvd, "rank"):
            hvd.another_name()
        value = hvd.one if hasattr(hvd, "one") else hvd.allreduce
        hasattr(hvd, "three") and hvd.three() or hvd.rank()
        if not hasattr(hvd, "five") or hvd.five():
            hvd.broadcast_optimizer_state(optimizer, 0)
        if hasattr(arguments, "six"):
            hvd.six()
        hvd.seven()
    """)
    assert {(line, what.removeprefix("horovod.torch.")) for line, what in told} == {
        (9, "broadcast_optimizer_state"), (11, "six"), (12, "seven")}, told


def methods_of_classes_need_no_instance() -> None:
    import hvdlite_torch

    class Tool:
        @classmethod
        def make(cls, size: int) -> None: ...

        @staticmethod
        def count(size: int) -> None: ...

        def use(self, size: int) -> None: ...
    vars(hvdlite_torch)["Tool"] = Tool  # it is horovod.torch
    assert {line for line, _ in _told("""
        import horovod.torch as hvd
        tool = hvd.Tool()
        tool.make(1), tool.count(1), tool.use(1)
        tool.make()
        tool.count(1, 2)
        tool.use()
    """)} == {4, 5, 6}


def what_newer_frameworks_lack_is_looked_up() -> None:
    import tensorflow as tf
    told = _told("""
        import tensorflow as tf
        from tensorflow.keras import applications
        from keras.preprocessing.image import ImageDataGenerator
        import horovod.tensorflow as hvd
        import horovod.keras
        session = tf.Session()
        hvd.broadcast_global_variables(0)
        model = tf.keras.Sequential([])
        opt = tf.optimizers.SGD(lr=0.1)
        opt = horovod.keras.DistributedOptimizer(opt, name="x")
        model.compile(loss="mse", optimizer=opt, experimental_run_tf_function=False)
        model.fit_generator(data)
        hvd.broadcast_variables(opt.variables(), root_rank=0)
        opt.lr.assign(model.optimizer.lr)
        getattr(applications, name)().compile(experimental_run_tf_function=False)
        @hvd.elastic.run
        def train(state):
            model.fit(data, callbacks=[horovod.keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=5)])
        if hasattr(tf, "Session"):
            session = tf.Session()
        if hasattr(opt, "lr"):
            opt.lr.assign(opt.lr)
        tf.keras.models.Model().from_config({})
    """)
    assert {place: effect for place, (effect, _) in told.items()} == {
        (3, "keras.preprocessing.image.ImageDataGenerator"): "fails",
        (6, "tensorflow.Session"): "fails",
        (7, "horovod.tensorflow.broadcast_global_variables()"): "fails",
        (9, "tensorflow.optimizers.SGD(lr=)"): "fails",
        (10, "horovod.keras.DistributedOptimizer"): "differs",
        (10, "horovod.keras.DistributedOptimizer(name=)"): "has no effect",
        (11, "model.compile()"): "fails",
        (12, "model.fit_generator()"): "fails",
        (13, "opt.variables()"): "fails",
        (14, "model.optimizer.lr"): "fails",
        (14, "opt.lr"): "fails",
        (15, "getattr(applications, name)().compile(experimental_run_tf_function=)"): "fails",
        (16, "horovod.tensorflow.elastic.run"): "differs",
        (18, "horovod.keras.callbacks.LearningRateWarmupCallback"): "differs",
    }
    assert told[6, "tensorflow.Session"][1] == f"tensorflow {tf.__version__} has no Session"
    assert told[7, "horovod.tensorflow.broadcast_global_variables()"][1] == "TensorFlow 2 has no global variables"
    assert told[12, "model.fit_generator()"][1] == (
        f"tensorflow.keras.Sequential {tf.__version__} has no fit_generator")


def scripts_that_run_are_said_to_run() -> None:
    from hvdlite.horovod_compat.check import check
    from hvdlite.horovod_compat.differences import Effect
    for name in ("elastic", "elastic_keras", "elastic_torch", "keras_fit", "sets_and_samplers", "synthetic", "tape",
                 "training"):
        found = check((HERE / f"{name}.py").read_text(encoding="utf-8"))
        assert not [each for each in found if each.effect in (Effect.FAILS, Effect.UNKNOWN)], (name, found)


def every_name_with_a_difference_exists() -> None:
    import importlib
    import inspect

    from hvdlite.horovod_compat import MODULES
    from hvdlite.horovod_compat.differences import DIFFERENCES, difference
    from hvdlite_torch.optimizer import DistributedOptimizer
    modules = {name: importlib.import_module(name) for name in MODULES if name != "horovod.ray"}
    names = {f"{name}.{each}" for name, module in modules.items() for each in dir(module)}
    names |= {f"{name}.{each}" for name in modules for each in getattr(modules[name], "__all__", ())}
    folder = Path(inspect.getfile(DistributedOptimizer)).parent
    methods = {line.split("(")[0].removeprefix("    def ") for path in folder.glob("*.py")
               for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("    def ")}
    names |= {f"horovod.torch.DistributedOptimizer().{each}" for each in methods}
    told = {found[1] for found in map(difference, names) if found is not None}
    assert {text for _, text in DIFFERENCES} <= told, {text for _, text in DIFFERENCES} - told


def frameworks_that_are_not_installed_are_named() -> None:
    import sys
    sys.modules["torch"] = None  # type: ignore[assignment]
    told = _told("""
        import horovod.torch as hvd
        hvd.init()
        hvd.allreduce(1, nam=2)
    """)
    assert set(told.values()) == {
        ("is not checked", "hvdlite_torch.allreduce needs torch: pip install 'hvdlite[torch]'")}, told
    assert all(line == 3 for line, _ in told)
