"""Modules named `horovod...` that are hvdlite, so that a script that imports Horovod runs unchanged.

After `import hvdlite.horovod_compat`, `import horovod.torch as hvd` gives `hvdlite_torch`, and so on; `hvdrun
--horovod-compat` does the same for a script that is not to be touched. Optimizers then wait for gradients in `step()`, as
Horovod's do, unless HVDLITE_WAIT_IN says otherwise. What is different: docs/migrating-from-horovod.md.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from hvdlite import api
from hvdlite.horovod_compat import elastic

MODULES = {
    "horovod": "hvdlite.horovod_compat.package",
    "horovod.common": "hvdlite.horovod_compat.package",
    "horovod.common.basics": "hvdlite",
    "horovod.common.elastic": "hvdlite.horovod_compat.elastic",
    "horovod.common.exceptions": "hvdlite.horovod_compat.elastic",
    "horovod.common.process_sets": "hvdlite",
    "horovod.common.util": "hvdlite.horovod_compat.util",
    "horovod.data": "hvdlite.data",
    "horovod.data.data_loader_base": "hvdlite.data",
    "horovod.keras": "hvdlite_tf.keras",
    "horovod.keras.callbacks": "hvdlite_tf.keras.callbacks",
    "horovod.keras.elastic": "hvdlite_tf.keras.elastic",
    "horovod.ray": "hvdlite.ray",
    "horovod.ray.runner": "hvdlite.ray",
    "horovod.runner": "hvdlite.horovod_compat.package",
    "horovod.runner.elastic": "hvdlite.horovod_compat.discovery",
    "horovod.runner.elastic.discovery": "hvdlite.horovod_compat.discovery",
    "horovod.runner.elastic.worker": "hvdlite.horovod_compat.elastic",
    "horovod.spark": "hvdlite.spark",
    "horovod.tensorflow": "hvdlite_tf",
    "horovod.tensorflow.compression": "hvdlite_tf.compression",
    "horovod.tensorflow.elastic": "hvdlite_tf.elastic",
    "horovod.tensorflow.functions": "hvdlite_tf",
    "horovod.tensorflow.keras": "hvdlite_tf.keras",
    "horovod.tensorflow.keras.callbacks": "hvdlite_tf.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "hvdlite_tf.keras.elastic",
    "horovod.tensorflow.mpi_ops": "hvdlite_tf",
    "horovod.tensorflow.sync_batch_norm": "hvdlite_tf.sync_batch_norm",
    "horovod.torch": "hvdlite_torch",
    "horovod.torch.compression": "hvdlite_torch.compression",
    "horovod.torch.elastic": "hvdlite_torch.elastic",
    "horovod.torch.elastic.sampler": "hvdlite_torch.elastic",
    "horovod.torch.elastic.state": "hvdlite_torch.elastic",
    "horovod.torch.functions": "hvdlite_torch",
    "horovod.torch.mpi_ops": "hvdlite_torch",
    "horovod.torch.optimizer": "hvdlite_torch",
    "horovod.torch.sync_batch_norm": "hvdlite_torch.sync_batch_norm",
}
"""Horovod's modules, and what they are here."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and loads the modules that stand for Horovod's; they keep their own names and specifications.

    Args:
        modules: names, and what they are here.
    """

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules
        self._own: dict[str, importlib.machinery.ModuleSpec | None] = {}  # of the modules that have been imported

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._modules:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self._modules)
        return importlib.util.spec_from_loader(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._modules[spec.name])
        self._own[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None  # that of Horovod's module, which Python has just set
        module.__spec__ = self._own[module.__spec__.name]


def _aliases() -> dict[str, str]:
    """Return what `from horovod.torch import mpi_ops` imports: Python puts the module's own name before it."""
    pairs = [(name.rpartition("."), target) for name, target in MODULES.items()]
    return {f"{MODULES[parent]}.{leaf}": target for (parent, _, leaf), target in pairs if parent in MODULES}


def install() -> None:
    """Take over the name `horovod`; again is fine.

    Raises:
        ImportError: when the real Horovod has been imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    loaded = sys.modules.get("horovod")
    if loaded is not None and "horovod_compat" not in str(getattr(loaded, "__file__", "")):
        raise ImportError(f"Horovod itself has been imported already, from {getattr(loaded, '__file__', '?')}; import "
                          "hvdlite.horovod_compat before it")
    sys.meta_path.insert(0, _Finder(MODULES))
    sys.meta_path.append(_Finder(_aliases()))
    api.set_default("wait_in", "step")
    elastic.install()


install()
