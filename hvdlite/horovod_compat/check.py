"""Read a script for Horovod without running it, and say line by line what is different: `hvdrun --horovod-check train.py`.

The script is parsed, and what it imports of Horovod, TensorFlow and Keras is looked up in the modules that are installed
here: names that do not exist, calls that a signature does not accept, and arguments that a docstring calls "accepted for
Horovod's sake". `differences.py` has what cannot be looked up.

The checker follows imports, plain assignments, and the classes of objects that a script makes. It does not follow values
through functions, other files, `getattr` and strings.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import hvdlite.horovod_compat
from hvdlite.horovod_compat.differences import METHODS, difference, variable_without_effect
from hvdlite.horovod_compat.scoped_names import ScopedNames

_CHECKED: Final = ("horovod", "tensorflow", "keras")
"""Packages whose names are looked up: newer versions of the frameworks lack names that scripts for Horovod use."""
_VARIABLE: Final = re.compile(r"HOROVOD_[A-Z0-9_]+")
_WITHOUT_EFFECT: Final = re.compile(r"^ +((?:\w+, )*\w+): accepted for (?:Horovod|compatibility)(.*)$", re.MULTILINE)
_OLD_ARGUMENT: Final = "experimental_run_tf_function"
"""An argument of `model.compile` that Horovod's documentation asked for."""
_GUARDS: Final = re.compile(r"\b(ImportError|ModuleNotFoundError|AttributeError|Exception)\b")
_RAISES: Final = "Raise an error: "
"""The beginning of the docstring of a function that is there for its message."""


class Effect(str, enum.Enum):
    """What a difference means for the script, the worst first."""

    FAILS = "fails"
    DIFFERS = "differs"
    IGNORED = "has no effect"
    UNKNOWN = "is not checked"

    def __str__(self) -> str:
        return self.value


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


@dataclasses.dataclass(frozen=True)
class _Instance:
    """An object of the script whose class is known."""

    kind: Any
    name: str


class _Missing(Exception):
    """A name does not exist; the message says where."""


class _NotInstalled(Exception):
    """A framework is not installed."""


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


class _Checker(ScopedNames):
    """Looks up what a script uses. Names mean dotted names of modules, and objects (`_Instance`)."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: set[Finding] = set()
        self._is_guarded = False  # by an `except` for what does not exist, or a condition that is false here
        self._is_caught = False  # whether something that is guarded fails
        self._present: frozenset[str] = frozenset()  # attributes of which `hasattr` was true

    def _add(self, node: ast.AST, what: str, effect: Effect, why: str) -> None:
        if effect is Effect.FAILS and self._is_guarded:
            self._is_caught = True
        else:
            self.findings.add(Finding(getattr(node, "lineno", 0), what, effect, why))

    def visit_Try(self, node: ast.Try) -> None:
        before, was_caught, self._is_caught = self._is_guarded, self._is_caught, False
        self._is_guarded |= any(handler.type is None or _GUARDS.search(ast.unparse(handler.type))
                                for handler in node.handlers)
        self._visit_all(node.body)
        is_caught, self._is_caught = self._is_caught, was_caught
        self._is_guarded = before
        self._visit_all(node.orelse)
        tried, ways = self._names, []
        for handler in node.handlers:
            self._names = dict(tried)
            self.visit(handler)
            ways.append(self._names)
        self._either(*(ways if is_caught and ways else [tried]))
        self._visit_all(node.finalbody)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        begin, condition = self._names, self._truth(node.test)
        self._names = dict(begin)
        self._visit_where(condition, node.body, _present(node.test, True))
        body, self._names = self._names, dict(begin)
        self._visit_where(None if condition is None else not condition, node.orelse, _present(node.test, False))
        self._either(*[way for way, is_taken in ((body, condition is not False), (self._names, not condition)) if is_taken])

    visit_IfExp = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        is_and, reached = isinstance(node.op, ast.And), True
        present: frozenset[str] = frozenset()
        for value in node.values:
            self._visit_where(reached, value, present)
            reached &= self._truth(value) is not (not is_and)
            present |= _present(value, is_and)

    def _visit_where(self, condition: bool | None, nodes: ast.AST | Sequence[ast.AST], present: frozenset[str]) -> None:
        """Visit what is run under a condition: nothing fails there if it is false, or if it is about what is present."""
        before, was_caught = (self._is_guarded, self._present), self._is_caught
        self._is_guarded |= condition is False
        self._present |= present
        self._visit_all(nodes)
        self._is_guarded, self._present = before
        if condition is False:
            self._is_caught = was_caught

    def _truth(self, test: ast.expr) -> bool | None:
        """Return whether a condition of `hasattr(module, name)` is true here; None if nobody can tell."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            truth = self._truth(test.operand)
            return None if truth is None else not truth
        if isinstance(test, ast.BoolOp):
            truths, decisive = [self._truth(value) for value in test.values], isinstance(test.op, ast.Or)
            return decisive if decisive in truths else None if None in truths else not decisive
        asked = _asked(test)
        owner = self._dotted(asked[0]) if asked else None
        if asked is None or owner is None:
            return None
        try:
            _found(f"{owner}.{asked[1]}")
        except _Missing:
            return False
        except _NotInstalled:
            return None
        return True

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.partition(".")[0] in _CHECKED:
                first = alias.name if alias.asname else alias.name.partition(".")[0]
                self._names[alias.asname or first] = first
                self._look_up(node, alias.name)
            else:
                self._forget(alias.asname or alias.name.partition(".")[0])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or (node.module or "").partition(".")[0] not in _CHECKED:
            self._forget(*(alias.asname or alias.name for alias in node.names))
            return
        assert node.module is not None
        for alias in node.names:
            if alias.name != "*":
                name = f"{node.module}.{alias.name}"
                self._names[alias.asname or alias.name] = name
                self._look_up(node, name)
                continue
            module = self._look_up(node, node.module)
            self._names |= {name: f"{node.module}.{name}" for name in getattr(module, "__all__", ())}

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and _VARIABLE.fullmatch(node.value) and variable_without_effect(node.value):
            self._add(node, node.value, Effect.IGNORED, "hvdlite neither reads nor sets this variable")

    def visit_Name(self, node: ast.Name) -> None:
        name = self._dotted(node)
        if name is not None:
            self._look_up(node, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._dotted(node)
        if name is not None:
            self._look_up(node, name)
            return
        owner = self._names.get(node.value.id) if isinstance(node.value, ast.Name) else None
        is_optimizer = isinstance(owner, _Instance) and hasattr(owner.kind, "learning_rate")
        is_there = ast.unparse(node) in self._present
        if node.attr == "lr" and not is_there and (is_optimizer or ast.unparse(node.value).endswith("model.optimizer")):
            self._add(node, ast.unparse(node), Effect.FAILS, "Keras 3 calls it learning_rate")
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._dotted(node.func)
        if name is not None:
            found = self._look_up(node, name)
            if found is not None:
                self._check_call(node, name, found)
        elif not self._is_checked_method(node):
            if any(argument.arg == _OLD_ARGUMENT for argument in node.keywords):
                self._add(node, f"{ast.unparse(node.func)}({_OLD_ARGUMENT}=)", Effect.FAILS, "Keras 3 does not take it")
            self.visit(node.func)
        for argument in (*node.args, *node.keywords):
            self.visit(argument)

    def _dotted(self, node: ast.AST) -> str | None:
        """Return the full name that an expression of dots means; None for any other expression."""
        if isinstance(node, ast.Name):
            known = self._names.get(node.id)
            return known if isinstance(known, str) else None
        if isinstance(node, ast.Attribute):
            parent = self._dotted(node.value)
            return None if parent is None else f"{parent}.{node.attr}"
        return None

    def _value(self, node: ast.expr) -> str | _Instance | None:
        """Return what an assigned expression means: a name, or an object whose class is known."""
        name = self._dotted(node.func if isinstance(node, ast.Call) else node)
        if name is None or not isinstance(node, ast.Call):
            return name
        try:
            kind = _found(name)
        except (_Missing, _NotInstalled):
            return None
        if name.endswith(".DistributedOptimizer") and node.args and isinstance(node.args[0], ast.Name):
            wrapped = self._names.get(node.args[0].id)  # it returns its argument
            return _Instance(wrapped.kind if isinstance(wrapped, _Instance) else None, name)
        return _Instance(kind, name) if isinstance(kind, type) else None

    def _look_up(self, node: ast.AST, name: str) -> Any:
        """Return what has a full name; None, with a finding, if that does not exist."""
        try:
            found = _found(name)
        except _Missing as error:
            self._add(node, name, Effect.FAILS, str(error))
            return None
        except _NotInstalled as error:
            self._add(node, name.rpartition(".")[0] or name, Effect.UNKNOWN, str(error))
            return None
        if difference(name):
            self._add(node, name, Effect.DIFFERS, difference(name))
        return found

    def _check_call(self, node: ast.Call, name: str, function: Any) -> None:
        text = inspect.getdoc(function) or ""
        is_ours = name.partition(".")[0] == "horovod"
        if is_ours and text.startswith(_RAISES):
            self._add(node, f"{name}()", Effect.FAILS, text.removeprefix(_RAISES).partition("\n")[0].rstrip("."))
        given = {argument.arg for argument in node.keywords if argument.arg}
        problem = _refusal(function, node, bound=False)
        if problem:
            self._add(node, f"{name}()", Effect.FAILS, problem)
        elif is_ours:
            for argument, why in _without_effect(function):
                if argument in given:
                    self._add(node, f"{name}({argument}=)", Effect.IGNORED, why)
        elif {"lr", "decay"} & given and ".optimizers." in name:
            self._add(node, f"{name}()", Effect.FAILS,
                      "Keras 3 takes learning_rate, which may be a schedule, not lr and decay")

    def _is_checked_method(self, node: ast.Call) -> bool:
        """Check the call of a method of an object whose class is known; return whether it is one."""
        function = node.func
        if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
            return False
        owner = self._names.get(function.value.id)
        if not isinstance(owner, _Instance):
            return False
        if function.attr in METHODS and owner.name.endswith("DistributedOptimizer"):
            self._add(node, f"{function.value.id}.{function.attr}()", Effect.DIFFERS, METHODS[function.attr])
        if owner.kind is None or hasattr(owner.kind, "__getattr__"):
            return True
        what, found = f"{function.value.id}.{function.attr}()", getattr(owner.kind, function.attr, None)
        static = inspect.getattr_static(owner.kind, function.attr, None)
        if found is None:
            is_there = ast.unparse(function) in self._present
            if not is_there and not owner.name.startswith("horovod."):  # elastic states have the script's attributes
                self._add(node, what, Effect.FAILS, f"{_described(owner.kind)} has no such method")
        elif isinstance(found, property):
            self._add(node, what, Effect.FAILS, f"it is an attribute of {_described(owner.kind)}, not a method")
        elif problem := _refusal(found, node, bound=not isinstance(static, (classmethod, staticmethod, type))):
            self._add(node, what, Effect.FAILS, problem)
        return True


def _asked(test: ast.expr) -> tuple[ast.expr, str] | None:
    """Return the object and the name of `hasattr(object, "name")`; None for another expression."""
    if not (isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "hasattr"):
        return None
    match test.args:
        case [owner, ast.Constant(value=str(name))]:
            return owner, name
    return None


def _present(test: ast.expr, outcome: bool) -> frozenset[str]:
    """Return the attributes that exist where a condition has an outcome, as the script writes them."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _present(test.operand, not outcome)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is outcome:
        return frozenset().union(*(_present(value, outcome) for value in test.values))
    asked = _asked(test) if outcome else None
    return frozenset([f"{ast.unparse(asked[0])}.{asked[1]}"] if asked else [])


def _found(name: str) -> Any:
    """Return the object of a full name.

    Raises:
        _Missing: when it does not exist.
        _NotInstalled: when a framework has to be installed to tell.
    """
    parts = name.split(".")
    module, rest = None, parts
    for length in range(len(parts), 0, -1):
        try:
            module, rest = importlib.import_module(".".join(parts[:length])), parts[length:]
            break
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not ".".join(parts[:length]).startswith(missing) or missing in ("tensorflow", "keras"):
                raise _NotInstalled(f"{missing} is not installed here") from None
        except ImportError as error:
            raise _NotInstalled(str(error).partition("\n")[0]) from None
    if module is None:
        raise _NotInstalled(f"{parts[0]} is not installed here")
    found: Any = module
    for index, part in enumerate(rest):
        try:
            found = getattr(found, part)
        except ImportError as error:  # modules of frontends load names late
            raise _NotInstalled(str(error).partition("\n")[0]) from None
        except AttributeError:
            where = ".".join(parts[:len(parts) - len(rest) + index])
            raise _Missing(f"{_described(found) if isinstance(found, type) else _home(where)} has no {part}") from None
    return found


def _home(name: str) -> str:
    """Return what a module is here, with its version if it is a framework's."""
    package = sys.modules.get(name.partition(".")[0])
    if name.partition(".")[0] == "horovod":
        return f"{name}, which is {hvdlite.horovod_compat.MODULES.get(name, 'hvdlite')}," if "." in name else "hvdlite"
    return f"{name} {getattr(package, '__version__', '')}".rstrip()


def _described(kind: type) -> str:
    package = kind.__module__.partition(".")[0]
    version = getattr(sys.modules.get(package), "__version__", "")
    return f"{kind.__name__} of {package} {version}".rstrip()


def _refusal(function: Any, call: ast.Call, *, bound: bool) -> str:
    """Return why a signature does not accept the arguments of a call; "" if it does, or nobody can tell.

    Args:
        bound: the function is a method, and the call does not show its first argument.
    """
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(each.arg is None for each in call.keywords):
        return ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    own = [None] if bound else []
    try:
        signature.bind(*own, *call.args, **{argument.arg: argument for argument in call.keywords if argument.arg})
    except TypeError as error:
        return str(error)
    return ""


def _without_effect(function: Any) -> Iterator[tuple[str, str]]:
    """Yield the arguments that a docstring calls accepted for Horovod's sake, and what it says of them."""
    for names, rest in _WITHOUT_EFFECT.findall(inspect.getdoc(function) or ""):
        for name in names.split(", "):
            yield name, rest.partition(";")[2].strip(" .") or "it is accepted for Horovod's sake"


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
