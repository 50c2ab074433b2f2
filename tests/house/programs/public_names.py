"""What a frontend's public names say of themselves, and its examples; in a process that imports the framework."""

from __future__ import annotations

import doctest
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"
sys.path.insert(0, str(DOCS))


def check(package: str, folder: str) -> dict[str, Any]:
    """Return what is wrong with a package's names and with its page, and the number of its examples.

    Args:
        folder: for files that the examples write.
    """
    public_names = importlib.import_module("public_names")
    hvd = importlib.import_module(package)
    names = public_names.public_names(package)
    functions = [each for name in sorted(names) for each in public_names.functions_of(public_names.look_up(package, name))]
    groups = public_names.groups((DOCS / "reference" / f"{public_names.FRONTENDS[package]}.md").read_text(encoding="utf-8"))
    shown = [name for _, _, _, group in groups for name in group]
    common = importlib.import_module("hvdlite")
    if package != "hvdlite":  # names that mean the same are on the page of common names
        names = {name for name in names if getattr(common, name, None) is not public_names.look_up(package, name)
                 or name in shown}
    modules = [value for value in (getattr(hvd, name) for name in hvd.__all__) if isinstance(value, ModuleType)]
    os.chdir(folder)
    hvd.init()
    frameworks = {"torch": "torch", "tensorflow": "tf", "keras": "keras", "numpy": "np"}
    globs = {short: sys.modules[name] for name, short in frameworks.items() if name in sys.modules}
    failed, number = doctest.testfile(str(DOCS / "reference" / f"{public_names.FRONTENDS[package]}.txt"), False,
                                      globs={"hvd": hvd, **globs}, optionflags=doctest.NORMALIZE_WHITESPACE)
    for name in public_names.examples(package):
        public_names.look_up(package, name)
    known = {*sys.modules, *(f"{module.__name__}.{name}" for module in [hvd, *modules] for name in module.__all__)}
    return {"undocumented": [f"{public_names.path(function)}: {name}" for function, overridden in functions
                             for name in public_names.missing(function, overridden)],
            "internal": [public_names.path(function) for function, _ in functions
                         if any(name.startswith("_") for name in public_names.parameters(function))] + [
                             f"{module.__name__}.{name}" for module in [hvd, *modules] for name in dir(module)
                             if not name.startswith("__") and f"{module.__name__}.{name}" not in known],
            "checked": len(functions), "not on the page": sorted(names - set(shown)),
            "twice": sorted({name for name in shown if shown.count(name) > 1}), "failed": failed, "examples": number}
