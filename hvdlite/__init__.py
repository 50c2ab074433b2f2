"""hvdlite: data-parallel training with Horovod's programming model, in pure Python.

`import hvdlite as hvd` works on NumPy and CuPy arrays; `hvdlite_torch` on PyTorch tensors and optimizers; `hvdlite_tf` and
`hvdlite_tf.keras` on those of TensorFlow and Keras.

Names are loaded when the first one is used: launchers need a few modules only, and no NumPy.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite import elastic as elastic
    from hvdlite.frontend import *
    from hvdlite.frontend.arrays import *
else:
    def __getattr__(name: str) -> Any:
        if name == "elastic":  # it imports what imports this package
            return importlib.import_module("hvdlite.elastic")
        from hvdlite.frontend import arrays

        if name in globals():  # a module of this package, which was imported just now
            return globals()[name]
        if name == "__all__" or name in arrays.__all__:
            value = globals()[name] = getattr(arrays, name)
            return value
        hint = "" if name[:1] == "_" else (": this is the frontend for arrays; for PyTorch import hvdlite_torch as hvd, for "
                                           "TensorFlow hvdlite_tf, for Keras hvdlite_tf.keras")
        raise AttributeError(f"module 'hvdlite' has no attribute '{name}'{hint}")

    _FRONTENDS = {"hvdlite.torch": "hvdlite_torch", "hvdlite.tensorflow": "hvdlite_tf", "hvdlite.keras": "hvdlite_tf.keras"}

    class _Frontends:
        """Gives the right names for imports that are spelled as Horovod's."""

        @staticmethod
        def find_spec(name: str, *arguments: Any) -> None:
            if name in _FRONTENDS:
                raise ModuleNotFoundError(f"there is no {name}: import {_FRONTENDS[name]} as hvd", name=name)

    sys.meta_path.append(_Frontends)

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), "elastic"})
