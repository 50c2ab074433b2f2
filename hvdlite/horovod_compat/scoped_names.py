"""What the names of a script mean on the line that uses them: assignments, scopes of functions and classes, branches."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


class ScopedNames(ast.NodeVisitor):
    """Visits a script from its first line to its last, so that a name means what was assigned to it last.

    A name that an argument, a loop, `with`, `except`, a definition or an import gives another meaning is forgotten.
    """

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._shared: set[str] = set()  # names of this scope that `global` and `nonlocal` declare

    def _value(self, node: ast.expr) -> Any:
        """Return what an assigned expression means; None for nothing known."""
        raise NotImplementedError

    def _bind(self, target: ast.AST, value: ast.expr | None = None) -> None:
        if isinstance(target, ast.Name):
            meaning = None if value is None else self._value(value)
            self._names.pop(target.id, None)
            if meaning is not None:
                self._names[target.id] = meaning
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._bind(each)
        elif isinstance(target, ast.Starred):
            self._bind(target.value)
        else:
            self.visit(target)

    def _forget(self, *names: str | None) -> None:
        for name in names:
            self._names.pop(name or "", None)

    def _visit_all(self, *nodes: ast.AST | Sequence[ast.AST] | None) -> None:
        for node in nodes:
            for each in [node] if isinstance(node, ast.AST) else node or ():
                self.visit(each)

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        outer, shared = self._names, self._shared
        self._names, self._shared = dict(outer), set()
        yield
        for name in self._shared:
            outer.pop(name, None)
            if name in self._names:
                outer[name] = self._names[name]
        self._names, self._shared = outer, shared

    def _either(self, *ways: dict[str, Any]) -> None:
        """Let names mean what they mean after one of several branches; nothing where these differ."""
        self._names = {}
        for name in {name for way in ways for name in way}:
            meanings = [way[name] for way in ways if name in way]
            if all(each == meanings[0] for each in meanings):
                self._names[name] = meanings[0]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all(node.decorator_list, node.args, node.returns)
        self._forget(node.name)
        self._visit_function(node.args, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._visit_function(node.args, node.body)

    def _visit_function(self, given: ast.arguments, body: ast.AST | Sequence[ast.AST]) -> None:
        with self._scope():
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]
            self._forget(*(each.arg for each in arguments))
            self._visit_all(body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(node.decorator_list, node.bases, node.keywords)
        with self._scope():
            self._visit_all(node.body)
        self._forget(node.name)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self._shared |= set(node.names)

    visit_Nonlocal = visit_Global

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all(node.annotation, node.value)
        if node.value is not None:
            self._bind(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._visit_all(node.target, node.value)
        self._bind(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, node.value)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._bind(node.target)
        self._visit_all(node.body, node.orelse)

    visit_AsyncFor = visit_For

    def visit_withitem(self, node: ast.withitem) -> None:
        self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._bind(node.optional_vars)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._visit_all(node.type)
        self._forget(node.name)
        self._visit_all(node.body)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        with self._scope():
            for each in node.generators:
                self.visit(each.iter)
                self._bind(each.target)
                self._visit_all(each.ifs)
            self._visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else node.elt)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._bind(target)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        self._visit_all(node.pattern)
        self._forget(node.name)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        self._forget(node.name)
