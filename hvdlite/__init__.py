"""hvdlite: data-parallel training with Horovod's programming model, in pure Python.

`import hvdlite as hvd` works on NumPy and CuPy arrays; `hvdlite_torch` on PyTorch tensors and optimizers; `hvdlite_tf` and
`hvdlite_tf.keras` on those of TensorFlow and Keras.

Names are loaded when the first one is used: launchers need a few modules only, and no NumPy.
"""

import importlib
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
        raise AttributeError(f"module 'hvdlite' has no attribute '{name}'")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
