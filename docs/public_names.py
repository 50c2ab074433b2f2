"""The reference of public names: in which groups they are on its pages, and what their parameters mean.

A parameter that several functions share is described once: a docstring that says "Like `name`" takes from there what its own
`Args:` leave out. The site shows the whole; `tests/house/test_docstrings.py` checks that nothing is missing.
"""

import functools
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

FRONTENDS = {"hvdlite": "core", "hvdlite_torch": "torch", "hvdlite_tf": "tensorflow", "hvdlite_tf.keras": "keras"}
"""The packages that scripts import, and their pages in docs/reference."""
GROUPS = re.compile(r"<!-- groups of ([\w.]+)\n(.*?)-->\n", re.DOTALL)
"""A block of a page. A line of it has a title, perhaps with a text in parentheses, and names."""
SECTIONS = re.compile(r"^(?:Args|Attributes):\n(?:(?: {4}.*)?\n?)*", re.MULTILINE)
ENTRY = re.compile(r"^ {4}([\w*, ]+): (.*(?:\n {8}.*)*)", re.MULTILINE)
AFTER = re.compile(r"^(?:Returns|Yields|Raises|Examples):$|\Z", re.MULTILINE)
"""The sections that come after the arguments."""


def groups(markdown: str) -> list[tuple[str, str, str, list[str]]]:
    """Return the groups of a page: a package, a title, a text if they have one row together, and names in the package."""
    found = []
    for package, lines in GROUPS.findall(markdown):
        for line in lines.splitlines():
            title, text, names = re.fullmatch(r"([^(:]+?)(?: \((.*)\))?: ([\w. ]+)", line).groups()  # type: ignore
            found.append((package, title, text or "", names.split()))
    return found


def reference(match: re.Match[str]) -> str:
    """Return what a page shows of a block of groups: a table for each, then all their names for mkdocstrings."""
    tables, details = [], []
    for package, title, text, names in groups(match[0]):
        values = {name: look_up(package, name) for name in names}
        paths = {name: path(value) for name, value in values.items() if not text}
        rows = [f"| {' '.join(f'`{name}`' for name in names)} | {text} |"] if text else [
            f"| [`{name.rpartition('.')[2]}`](#{anchor}) | {summary(values[name])} |" for name, anchor in paths.items()]
        tables += [f"| {title} | |", "|---|---|", *rows, ""]
        details += [f"## {title}", "", *(f"::: {anchor}\n" for anchor in paths.values())] if paths else []
    return "\n".join([*tables, *details]) + "\n"


def look_up(package: str, name: str) -> Any:
    """Return what a public name of a package stands for; names in a module of it are `module.name`."""
    return functools.reduce(getattr, name.split("."), importlib.import_module(package))


def path(value: Any) -> str:
    """Return where a class or function is defined."""
    return f"{value.__module__}.{value.__qualname__}"


def public_names(package: str) -> set[str]:
    """Return all public names of a package, with those of its public modules."""
    module = importlib.import_module(package)
    found = set()
    for name in module.__all__:
        value = getattr(module, name)
        if not isinstance(value, ModuleType):
            found.add(name)
        elif f"{package}.{name}" not in FRONTENDS:
            found |= {f"{name}.{each}" for each in value.__all__}
    return found


def summary(value: Any) -> str:
    """Return the first sentence of a docstring."""
    return " ".join(re.split(r"\n\n|(?<=[.:;]) (?=[A-Z])", inspect.getdoc(value) or "")[0].split()).rstrip(".:")


def functions_of(value: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Yield a public function, or a class and its public methods; with what they override, the nearest last.

    Methods by which a class implements an interface of its framework are left out.
    """
    if not inspect.isclass(value):
        yield from [(value, [])] if inspect.isfunction(value) else []
        return
    owners = [owner for owner in reversed(value.__mro__) if owner is not object]
    yield value, owners[:-1]
    for name in dir(value):
        having = [owner for owner in owners if name in vars(owner)]
        if not name.startswith("_") and inspect.isroutine(getattr(value, name)) and all(map(is_ours, having)):
            *overridden, function = [getattr(owner, name) for owner in having]
            yield function, overridden


def is_ours(value: Any) -> bool:
    """Return whether a class or function is hvdlite's."""
    return getattr(value, "__module__", "").partition(".")[0] in ("hvdlite", "hvdlite_torch", "hvdlite_tf")


def arguments(function: Any, overridden: Sequence[Any] = ()) -> dict[str, str]:
    """Return the descriptions of a function's parameters, or of a class's, in their order; some may be missing.

    Args:
        overridden: functions of base classes, or these, whose descriptions count where there is no other.
    """
    text = inspect.getdoc(function) or ""
    found = {}
    for other in (*overridden, *_named(text, function)):
        found |= arguments(other) if is_ours(other) else dict.fromkeys(parameters(other), f"as in `{other.__qualname__}`")
    for names, description in ENTRY.findall("".join(SECTIONS.findall(text))):
        found |= dict.fromkeys(names.replace("*", "").split(", "), description)
    for name in parameters(function):
        if name.removesuffix("s") in found:  # `tensors` of a grouped collective
            found.setdefault(name, f"each: {found[name.removesuffix('s')]}")
    return {name: found[name] for name in parameters(function) if name in found}


def missing(function: Any, overridden: Sequence[Any] = ()) -> list[str]:
    """Return the parameters without a description."""
    return [name for name in parameters(function) if name not in arguments(function, overridden)]


def parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters; none for classes that users do not make."""
    if inspect.isclass(function) and (issubclass(function, BaseException) or not is_ours(function.__init__)):
        return []
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def completed(function: Any, overridden: Sequence[Any]) -> str:
    """Return a docstring with the arguments that it takes from others."""
    text, known = inspect.getdoc(function) or "", arguments(function, overridden)
    if not known or "Attributes:" in text:
        return text
    section = "".join(f"    {name}: {description}\n" for name, description in known.items())
    text = SECTIONS.sub("", text).rstrip() + "\n"
    at = AFTER.search(text).start()  # type: ignore[union-attr]
    return f"{text[:at].rstrip()}\n\nArgs:\n{section}\n{text[at:]}"


def _named(text: str, function: Any) -> Iterator[Any]:
    """Yield the functions and classes that a docstring says its own is like."""
    here = sys.modules[function.__module__]
    for name in re.findall(r"[Ll]ike `([\w.]+)`", text):
        head, *rest = name.split(".")
        owner = getattr(here, function.__qualname__.partition(".")[0], None)
        start = getattr(owner if hasattr(owner, head) else here, head, None) or sys.modules.get(head)
        other = functools.reduce(lambda value, each: getattr(value, each, None), rest, start)
        if (inspect.isclass(other) or inspect.isroutine(other)) and other is not function:
            yield other


def examples(package: str) -> dict[str, str]:
    """Return the examples of a package by the names that they are for."""
    text = (Path(__file__).parent / "reference" / f"{FRONTENDS[package]}.txt").read_text(encoding="utf-8")
    titles = re.split(r"^([\w.]+)\n-+\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(titles[::2], titles[1::2], strict=True))


@functools.cache
def _examples() -> dict[str, str]:
    """Return all examples by the paths of what they are for."""
    return {path(look_up(package, name)): text for package in FRONTENDS for name, text in examples(package).items()}


@functools.cache
def _docstrings() -> dict[str, str]:
    """Return the completed docstrings of all public functions by their paths."""
    return {path(function): completed(function, overridden)
            for package in FRONTENDS for name in public_names(package)
            for function, overridden in functions_of(look_up(package, name))}


class SharedArguments(griffe.Extension):
    """Lets mkdocstrings show the arguments that docstrings take from others, and the examples."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Complete a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _docstrings().get(obj.path, obj.docstring.value)
            if obj.path in _examples():
                obj.docstring.value += "\n\nExamples:\n" + textwrap.indent(_examples()[obj.path], "    ")
