"""Read a script for Horovod without running it, and report what is different by line: `hvdrun --horovod-check train.py`.

The script is parsed, and what it imports of Horovod, TensorFlow and Keras is looked up in the modules that are installed
here: names that do not exist, calls that a signature does not accept, and arguments that a docstring calls "accepted for
Horovod's sake". `differences.py` has what cannot be looked up.

The checker follows imports, and variables to which a script assigns a name or a new object. It does not follow values
through functions, loops, other files, `getattr` and strings.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import hvdlite.horovod_compat  # noqa: F401 (it makes the modules named horovod)
from hvdlite.horovod_compat.differences import Effect, difference, variable_without_effect

_CHECKED: Final = ("horovod", "tensorflow", "keras")
"""Packages whose names are looked up: newer versions of the frameworks lack names that scripts for Horovod use."""
_VARIABLE: Final = re.compile(r"HOROVOD_[A-Z0-9_]+")
_WITHOUT_EFFECT: Final = re.compile(r"^ +((?:\w+, )*\w+): accepted for (?:Horovod|compatibility)(.*)$", re.MULTILINE)
_GUARDS: Final = re.compile(r"\b(ImportError|ModuleNotFoundError|AttributeError|Exception)\b")
_RAISES: Final = "Raise an error: "
"""The beginning of the docstring of a function that is there for its message."""


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A difference.

    Attributes:
        what: the name, as Horovod or the framework has it.
        why: a clause.
    """

    line: int
    what: str
    effect: Effect
    why: str

    def __str__(self) -> str:
        return f"{self.line}: {self.what} {self.effect}: {self.why}"


_NOTHING: Final = object()


class _Missing(Exception):
    """A name does not exist; the message has where."""


def check(source: str, path: str = "<script>") -> list[Finding]:
    """Return what is different, in the order of lines.

    Args:
        source: of the script.
        path: for errors.

    Raises:
        SyntaxError: if the script is no Python 3.
    """
    checker = _Checker()
    checker.visit(ast.parse(source, path))
    return sorted(checker.findings)


class _Checker(ast.NodeVisitor):
    """Visits a script from its first line to its last, so that a name means what was assigned to it last.

    Full names are dotted; `keras.Sequential().fit` is a method of an object of the class `keras.Sequential`.
    """

    def __init__(self) -> None:
        self.findings: set[Finding] = set()
        self._names: dict[str, str] = {}  # full names by those of the script
        self._is_guarded = False  # by an `except` for what does not exist, or by hasattr

    def _add(self, node: ast.AST, what: str, effect: Effect, why: str) -> None:
        if effect is not Effect.FAILS or not self._is_guarded:
            self.findings.add(Finding(getattr(node, "lineno", 0), what, effect, why))

    # --- names -----------------------------------------------------------------------------------------------------------

    def _full_name(self, node: ast.AST | None) -> str | None:
        """Return the full name that an expression means; None for any other expression."""
        match node:
            case ast.Name():
                return self._names.get(node.id)
            case ast.Attribute():
                name = self._full_name(node.value)
                is_deep = name is not None and "()" in name and not isinstance(node.value, ast.Name)
                return None if name is None or is_deep else f"{name}.{node.attr}"
            case ast.Call():
                name = self._full_name(node.func)
                if name and name.endswith(".DistributedOptimizer") and node.args:  # the optimizer is returned as it is
                    return self._full_name(node.args[0]) or f"{name}()"
                return name and f"{name}()"
        return None

    def _bind(self, name: str, meaning: str | None) -> None:
        self._names.pop(name, None)
        if meaning is not None:
            self._names[name] = meaning

    def _visit_scope(self, node: ast.AST) -> None:
        outer = dict(self._names)
        self.generic_visit(node)
        self._names = outer

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_ClassDef = _visit_scope

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        outer = dict(self._names)
        for generator in node.generators:
            self.visit(generator)
        self.generic_visit(node)
        self._names = outer

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension

    def visit_arg(self, node: ast.arg) -> None:
        self._bind(node.arg, None)

    def visit_Assign(self, node: ast.Assign) -> None:
        meaning = self._full_name(node.value)
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)
            if isinstance(target, ast.Name):
                self._bind(target.id, meaning)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._bind(alias.asname or name, name if self._is_there(node, alias.name) else None)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                name = f"{'.' * node.level}{node.module}.{alias.name}"
                self._bind(alias.asname or alias.name, name if self._is_there(node, name) else None)
            elif self._is_there(node, f"{'.' * node.level}{node.module}"):
                public = getattr(_found(f"{node.module}"), "__all__", ())
                self._names |= {name: f"{node.module}.{name}" for name in public}

    def _is_there(self, node: ast.AST, name: str) -> bool:
        return name.partition(".")[0] in _CHECKED and self._look_up(node, name) is not None

    # --- what is run under a condition -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self, by: bool) -> Iterator[None]:
        """Nothing fails in a branch that is there for what may not exist."""
        before, self._is_guarded = self._is_guarded, self._is_guarded or by
        yield
        self._is_guarded = before

    def visit_Try(self, node: ast.Try) -> None:
        with self._guarded(any(each.type is None or _GUARDS.search(ast.unparse(each.type)) for each in node.handlers)):
            self._visit_all(node.body)
        tried = dict(self._names)
        self._visit_all(node.handlers)
        self._names |= tried
        self._visit_all([*node.orelse, *node.finalbody])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        with self._guarded(self._asks(node.test)):
            before = dict(self._names)
            self._visit_all(node.body)
            body, self._names = self._names, before
            self._visit_all(node.orelse)
        both = (body | self._names).items()
        self._names = {name: meaning for name, meaning in both if body.get(name, meaning) == meaning}

    def _visit_expression(self, node: ast.IfExp | ast.BoolOp) -> None:
        with self._guarded(self._asks(node)):
            self.generic_visit(node)

    visit_IfExp = visit_BoolOp = _visit_expression

    def _asks(self, test: ast.expr) -> bool:
        """Return whether a condition asks which names a module or an object has that is looked up."""
        return any(isinstance(node, ast.Call) and ast.unparse(node.func) == "hasattr" and self._full_name(node.args[0])
                   for node in ast.walk(test))

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # --- differences -----------------------------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _VARIABLE.fullmatch(node.value) and variable_without_effect(node.value):
            self._add(node, node.value, Effect.IGNORED, "hvdlite neither reads nor sets this variable")

    def visit_Name(self, node: ast.Name) -> None:
        name = self._full_name(node)
        if not isinstance(node.ctx, ast.Load):
            self._bind(node.id, None)
        elif name is not None and "()" not in name:
            self._look_up(node, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._full_name(node)
        if name is not None and "()" not in name:
            self._look_up(node, name)
        else:  # objects have attributes that their class does not show
            self._compare(node, name or "", ast.unparse(node))
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name, what = self._full_name(node.func) or "", ast.unparse(node.func)
        if not name or name.endswith("()"):
            self.visit(node.func)
            found = None
        else:
            found = self._look_up(node, name, f"{what}()" if "()" in name else name)
        what = name if found is not None and "()" not in name else what
        problem = "" if found is None else _problem(name, found, node)
        if problem:
            self._add(node, f"{what}()", Effect.FAILS, problem)
        effects = _without_effect(found) if name.startswith("horovod.") else {}
        for given in [] if problem else [argument.arg for argument in node.keywords if argument.arg]:
            self._compare(node, f"{name}({given}=)", f"{what}({given}=)")
            if given in effects:
                self._add(node, f"{what}({given}=)", Effect.IGNORED, effects[given])
        self._visit_all([*node.args, *node.keywords])

    def _compare(self, node: ast.AST, name: str, what: str) -> None:
        """Report the difference that `differences.py` has for a full name, or of what the script has written."""
        found = difference(name) or difference(what)
        if found is not None:
            self._add(node, what, *found)

    def _look_up(self, node: ast.AST, name: str, what: str = "") -> Any:
        """Return what has a full name; None, with a finding, if that does not exist."""
        found = None
        try:
            found = _found(name)
        except _Missing as error:
            self._add(node, what or name, Effect.FAILS, str(error))
        except ImportError as error:
            self._add(node, name.rpartition(".")[0] or name, Effect.UNKNOWN, str(error).partition("\n")[0])
        else:
            self._compare(node, name, what or name)
        return found


def _found(name: str) -> Any:
    """Return the object of a full name; None if that cannot be determined, because it belongs to an object.

    Raises:
        _Missing: when it does not exist.
        ImportError: when that takes a framework that is not installed.
    """
    where, *parts = name.split(".")
    found: Any = importlib.import_module(where)
    version = "of hvdlite" if where == "horovod" else getattr(found, "__version__", "")
    for part in parts:
        attribute, owner = part.removesuffix("()"), found
        found = _submodule(f"{where}.{attribute}") if inspect.ismodule(owner) else _NOTHING
        found = getattr(owner, attribute, _NOTHING) if found is _NOTHING else found
        if found is _NOTHING and where.endswith("()") and name.startswith("horovod."):
            return None  # elastic states have the script's attributes
        if found is _NOTHING:
            raise _Missing(f"{where.removesuffix('()')} {version} has no {attribute}")
        if where.endswith("()") and inspect.isfunction(inspect.getattr_static(owner, attribute, None)):
            found = types.MethodType(found, owner)  # its signature lacks the first argument
        if part.endswith("()") and (not isinstance(found, type) or hasattr(found, "__getattr__")):
            return None
        where = f"{where}.{part}"
    return found


def _submodule(name: str) -> Any:
    """Return a module, which Python prefers to a name of the package; `_NOTHING` if there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):
            return _NOTHING
        raise  # a framework is missing


def _problem(name: str, function: Any, call: ast.Call) -> str:
    """Return why a call fails; "" if it does not, or if that cannot be determined."""
    text = inspect.getdoc(function) or ""
    if isinstance(function, property):
        return "it is an attribute, not a method"
    if name.startswith("horovod.") and text.startswith(_RAISES):
        return text.removeprefix(_RAISES).partition("\n")[0].rstrip(".")
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(each.arg is None for each in call.keywords):
        return ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*call.args, **{argument.arg: argument for argument in call.keywords if argument.arg})
    except TypeError as error:
        return str(error)
    return ""


def _without_effect(function: Any) -> dict[str, str]:
    """Return the arguments that a docstring calls accepted for Horovod's sake, and what it adds about them."""
    return {name: rest.partition(";")[2].strip(" .") or "it is accepted for Horovod's sake"
            for names, rest in _WITHOUT_EFFECT.findall(inspect.getdoc(function) or "") for name in names.split(", ")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check scripts and print what was found; return 1 if something fails, 2 for a script that cannot be read."""
    parser = argparse.ArgumentParser(prog="hvdrun --horovod-check", description="Say what is different under hvdlite.")
    parser.add_argument("scripts", nargs="+", metavar="script.py")
    code = 0
    for path in parser.parse_args(arguments).scripts:
        try:
            findings = check(Path(path).read_bytes().decode("utf-8-sig"), path)
        except (OSError, SyntaxError, ValueError) as error:  # no Python 3, or no text
            print(f"hvdrun: {path} cannot be read: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            code = 2
            continue
        except (RecursionError, MemoryError):  # of Python's parser, too
            print(f"hvdrun: {path} is not checked: its statements or expressions are nested too deeply (each elif is inside "
                  "the one before it)", file=sys.stderr)
            code = 2
            continue
        for finding in findings:
            print(f"{path}:{finding}")
        counts = [f"{sum(each.effect is effect for each in findings)} {effect}" for effect in Effect]
        print(f"{path}: {', '.join(counts)}" if findings else f"{path}: no difference found")
        code = max(code, int(any(each.effect is Effect.FAILS for each in findings)))
    return code


if __name__ == "__main__":
    sys.exit(main())
