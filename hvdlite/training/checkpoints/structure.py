"""Structures of plain data and tensors, as JSON and a dict of arrays: no pickle, so that a checkpoint cannot run code.

What JSON lacks is an object with a key "!", which names its type. {"!": "tensor", "of": FRAMEWORK, "name": NAME} is a
tensor.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np

from hvdlite.core.array import Array
from hvdlite.core.errors import UnsupportedError
from hvdlite.training.checkpoints import kinds

_TAG: Final = "!"
_SEQUENCES: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {"tuple": tuple, "set": set}
_MAPPINGS: Final[dict[str, Callable[[Any], Any]]] = {
    "dict": dict, "OrderedDict": collections.OrderedDict, "Counter": lambda items: collections.Counter(dict(items))}


def taken_apart(name: str, value: Any, arrays: dict[str, Array]) -> Any:
    """Return a structure as JSON, and add its tensors to those of others, by name.

    Args:
        name: what the names of its tensors begin with.

    Raises:
        UnsupportedError: for what is no plain data, naming where it is.
    """
    def array(where: str, kind: str, found: Array, **more: str) -> dict[str, str]:
        key = where
        while key in arrays:  # {"a.b": x, "a": {"b": y}}
            key += "'"
        arrays[key] = found
        return {_TAG: kind, **more, "name": key}

    def plain(where: str, each: Any) -> Any:
        try:
            tensor = kinds.as_array(each)
        except UnsupportedError as error:
            raise UnsupportedError(f"'{where}' cannot be saved: {error}") from None
        if tensor is not None:
            return array(where, "tensor", tensor[1], of=tensor[0])
        is_array = type(each) is np.ndarray or isinstance(each, np.generic)
        if is_array and not each.dtype.hasobject and each.dtype.fields is None:
            return array(where, "scalar" if isinstance(each, np.generic) else "array", np.asarray(each, order="C"))
        kind = type(each)
        if each is None or kind in (bool, int, str) or (kind is float and each - each == 0):
            return each
        if kind in (float, complex):
            return {_TAG: kind.__name__, "text": repr(each)}
        if kind is bytes:
            return array(where, "bytes", np.frombuffer(each, np.uint8))
        if kind is list:
            return items(where, each)
        if kind is set:
            return {_TAG: "set", "items": items(where, sorted(each, key=repr))}  # in the same order on all ranks
        if isinstance(each, tuple) and not hasattr(each, "_fields"):  # torch.Size is one
            return {_TAG: "tuple", "items": items(where, each)}
        if kind is dict and all(type(key) is str for key in each) and _TAG not in each:
            return {key: plain(f"{where}.{key}", item) for key, item in each.items()}
        if isinstance(each, dict) and kind.__name__ in _MAPPINGS:
            versions = {"metadata": plain(f"{where}._metadata", each._metadata)} if hasattr(each, "_metadata") else {}
            return {_TAG: kind.__name__, **versions,  # of torch's modules
                    "items": [[plain(f"{where}.key", key), plain(f"{where}.{key}", item)] for key, item in each.items()]}
        raise UnsupportedError(
            f"'{where}' cannot be saved: it is a {kind.__module__}.{kind.__qualname__}. hvd.save takes objects with "
            "state_dict() and load_state_dict(), tensors, arrays, numbers, strings, and dicts, lists, tuples and sets of "
            "these")

    def items(where: str, values: Iterable[Any]) -> list[Any]:
        return [plain(f"{where}.{index}", item) for index, item in enumerate(values)]

    try:
        return plain(name, value)
    except RecursionError:
        raise UnsupportedError(f"'{name}' cannot be saved: it contains itself") from None


def put_together(skeleton: Any, arrays: Mapping[str, Array]) -> Any:
    """Return the structure that `taken_apart` has taken apart."""
    def made(each: Any) -> Any:
        if isinstance(each, list):
            return [made(item) for item in each]
        if not isinstance(each, dict):
            return each
        if _TAG not in each:
            return {key: made(item) for key, item in each.items()}
        kind = each[_TAG]
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(made, each["items"]))
        if kind in _MAPPINGS:
            mapping = _MAPPINGS[kind]([(made(key), made(item)) for key, item in each["items"]])
            if "metadata" in each:
                mapping._metadata = made(each["metadata"])
            return mapping
        if kind in ("float", "complex"):
            return {"float": float, "complex": complex}[kind](each["text"])
        array = arrays[each["name"]]
        if kind == "tensor":
            return kinds.as_tensor(each["of"], array)
        if kind == "bytes":
            return array.tobytes()
        return array[()] if kind == "scalar" else array

    return made(skeleton)
