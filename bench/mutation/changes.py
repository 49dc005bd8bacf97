"""Single small changes of a Python source, found in its syntax tree, for a mutation test to apply.

Only code inside functions is changed. Annotations, decorators, defaults, assertions, texts of errors, log
calls and `__repr__` are left alone: no behaviour depends on them.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
AUGMENTED: dict[type[ast.operator], str] = {ast.Add: "-=", ast.Sub: "+=", ast.BitOr: "&=", ast.BitAnd: "|="}
QUIET_CALLS = ("log", "_log", "logger", "checkpoint", "debug", "info", "warning")
"""No test is owed for a removed line of a log, nor for a removed pause."""


@dataclass(frozen=True)
class Mutation:
    """One change: the bytes [start, end) of the UTF-8 source become `after`."""

    function: str
    operator: str
    line: int
    start: int
    end: int
    before: str
    after: str
    number: int = 0
    """Among equal changes of the same function, in order."""

    @property
    def name(self) -> str:
        """Stays the same while other functions of the module change."""
        suffix = f" #{self.number}" if self.number else ""
        return f"{self.function}: {self.before} -> {self.after}{suffix}"

    def applied(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """Every change that the operators know, in the order of the source. Raises SyntaxError."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    seen = Counter[str]()
    numbered = []
    for found in finder.found:
        numbered.append(replace(found, number=seen[found.name]))
        seen[found.name] += 1
    return numbered


class Named(Protocol):
    """What is drawn: its name decides when."""

    @property
    def name(self) -> str: ...


Drawn = TypeVar("Drawn", bound=Named)


def sampled(rooms: Mapping[str, Sequence[Drawn]], seed: int) -> list[Drawn]:
    """All of all rooms, rooms in turn, each room in an order that only the seed and the names decide."""

    def rank(mutant: Drawn) -> bytes:
        return hashlib.sha256(f"{seed}:{mutant.name}".encode()).digest()

    queues = [sorted(rooms[room], key=rank, reverse=True) for room in sorted(rooms)]
    drawn = []
    while any(queues):
        drawn += [queue.pop() for queue in queues if queue]
    return drawn


class _Finder(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.found: list[Mutation] = []
        self._data = source.encode()
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._scope: list[str] = []

    def visit_Module(self, node: ast.Module) -> None:
        self._definitions(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._definitions(node.body)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("remove", node, "pass")

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add("remove", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("loop", node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self._add("loop", node, "continue")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await) and not _is_quiet(node.value):
            self._add("remove", node, "pass")
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        # Without its attribute a new object is broken in every test, which says nothing about them.
        is_initial = self._scope[-1:] in (["__init__"], ["__post_init__"])
        if not is_initial and any(isinstance(x, ast.Attribute | ast.Subscript) for x in node.targets):
            self._add("remove", node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("remove", node, "pass")
        if flipped := AUGMENTED.get(type(node.op)):
            self._add("count", node, f"{ast.unparse(node.target)} {flipped} {ast.unparse(node.value)}")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        if not isinstance(node.value, ast.Constant):
            self._add("return", node, "return None")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add("condition", node, f"bool({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("condition", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
        for i in range(len(node.values)):
            left = [*node.values[:i], *node.values[i + 1 :]]
            kept = left[0] if len(left) == 1 else ast.BoolOp(node.op, left)
            self._add("condition", node, f"({ast.unparse(kept)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            changed = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
            operator = "bound" if isinstance(node.ops[0], ORDERS) else "condition"
            self._add(operator, node, f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        has_text = any(
            isinstance(x, ast.JoinedStr) or (isinstance(x, ast.Constant) and isinstance(x.value, str | bytes))
            for x in (node.left, node.right)
        )
        if isinstance(node.op, ast.Add | ast.Sub) and not has_text:
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
            self._add("arithmetic", node, f"({ast.unparse(ast.BinOp(node.left, other, node.right))})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_quiet(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            self._add("bound", node.func, "max" if node.func.id == "min" else "min")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool():
                self._add("constant", node, str(not node.value))
            case int():
                self._add("constant", node, str(node.value + 1))
            case float():
                self._add("constant", node, str(node.value * 2 + (node.value == 0)))

    def _definitions(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self.visit(statement)

    def _negate(self, test: ast.expr) -> None:
        negated_elsewhere = (isinstance(test, ast.Compare) and not isinstance(test.ops[0], ORDERS)) or (
            isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        )
        if not negated_elsewhere:
            self._add("condition", test, f"(not ({ast.unparse(test)}))")

    def _add(self, operator: str, node: ast.stmt | ast.expr, after: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        end = self._lines[node.end_lineno - 1] + node.end_col_offset
        before = " ".join(self._data[start:end].decode().split())
        self.found.append(Mutation(".".join(self._scope), operator, node.lineno, start, end, before, after))


def _is_quiet(node: ast.expr) -> bool:
    if isinstance(node, ast.Await):
        return _is_quiet(node.value)
    if not isinstance(node, ast.Call):
        return False
    name = node.func
    while isinstance(name, ast.Attribute):
        if name.attr in QUIET_CALLS:
            return True
        name = name.value
    return isinstance(name, ast.Name) and name.id in QUIET_CALLS
