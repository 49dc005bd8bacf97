"""Finds which functions a function leads to, from the source alone: what it calls or hands on by reference.

Types are read from annotations: of parameters, fields, attributes set in `__init__` and return values. An
attribute of a protocol's type leads to the class that `IMPLEMENTS` names for it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "swarmllm": ROOT / "swarmllm",
    "swarmllm_workers": ROOT / "workers" / "swarmllm_workers",
    "swarmllm_proto": ROOT / "proto" / "swarmllm_proto",
}
DEPTH_MAX = 6
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """A function or class: module and qualified name in it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    @property
    def room(self) -> str:
        """The package."""
        return self.module.rpartition(".")[0]

    def method(self, name: str) -> Place:
        return Place(self.module, f"{self.name}.{name}")


@dataclass
class Class:
    place: Place
    bases: list[ast.expr]
    methods: dict[str, Function] = field(default_factory=dict)
    fields: dict[str, list[ast.expr]] = field(default_factory=dict)
    """Annotations, and what is assigned."""


@dataclass
class Module:
    names: dict[str, Place] = field(default_factory=dict)
    """What is imported."""
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, Class] = field(default_factory=dict)
    aliases: dict[str, ast.expr] = field(default_factory=dict)


def path_of(module: str) -> Path | None:
    package, _, rest = module.partition(".")
    if package not in PACKAGES:
        return None
    base = PACKAGES[package].joinpath(*rest.split(".")) if rest else PACKAGES[package]
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def read(name: str) -> Module | None:
    path = path_of(name)
    if path is None:
        return None
    module = Module()
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                module.names[alias.asname or alias.name] = Place(node.module, alias.name)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            module.classes[node.name] = read_class(Place(name, node.name), node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.aliases[node.targets[0].id] = node.value
    return module


def read_class(place: Place, node: ast.ClassDef) -> Class:
    found = Class(place, node.bases)
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found.methods.setdefault(child.name, child)
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.fields.setdefault(child.target.id, []).append(child.annotation)
    for method in found.methods.values():
        annotated = {each.arg: each.annotation for each in arguments(method) if each.annotation}
        for inner in ast.walk(method):
            targets: list[ast.expr] = []
            values: list[ast.expr] = []
            if isinstance(inner, ast.AnnAssign):
                targets, values = [inner.target], [inner.annotation]
                values += [inner.value] if inner.value else []
            elif isinstance(inner, ast.Assign):
                targets, values = inner.targets, [inner.value]
            for target in (each for outer in targets for each in ast.walk(outer)):
                if isinstance(target, ast.Attribute) and is_self(target.value):
                    for value in values:
                        names = [x.id for x in ast.walk(value) if isinstance(x, ast.Name)]
                        known = [annotated[x] for x in names if x in annotated]
                        found.fields.setdefault(target.attr, []).extend([*known, value])
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def arguments(function: Function) -> list[ast.arg]:
    its = function.args
    return [*its.posonlyargs, *its.args, *its.kwonlyargs]


@cache
def class_at(place: Place) -> Class | None:
    """Follows re-exports."""
    module = read(place.module)
    if module is None:
        return None
    if place.name in module.classes:
        return module.classes[place.name]
    onward = module.names.get(place.name)
    return class_at(onward) if onward is not None and onward != place else None


def function_at(place: Place) -> Function | None:
    module = read(place.module)
    if module is None:
        return None
    owner, _, name = place.name.rpartition(".")
    if owner:
        found = module.classes.get(owner)
        return found.methods.get(name) if found else None
    return module.functions.get(name)


class Reader:
    """One function's body, with the types that its names have."""

    def __init__(self, place: Place, function: Function, implements: dict[str, Place]) -> None:
        self._place = place
        self._function = function
        self._implements = implements
        module = read(place.module)
        assert module is not None
        self._module = module
        owner = place.name.rpartition(".")[0]
        self._class = module.classes.get(owner)
        self._values: dict[str, list[ast.expr]] = {}
        for each in arguments(function):
            if each.annotation is not None:
                self._values.setdefault(each.arg, []).append(each.annotation)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self._values.setdefault(target.id, []).append(node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self._values.setdefault(node.target.id, []).append(node.annotation)
                if node.value is not None:
                    self._values[node.target.id].append(node.value)
            elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
                self._values.setdefault(node.optional_vars.id, []).append(node.context_expr)
            elif isinstance(node, ast.NamedExpr):
                self._values.setdefault(node.target.id, []).append(node.value)
            elif isinstance(node, ast.For):
                for inner in ast.walk(node.target):
                    if isinstance(inner, ast.Name):
                        self._values.setdefault(inner.id, []).append(node.iter)

    def leads_to(self) -> Iterator[tuple[Place, ast.Call | None]]:
        """Functions that are called or named, with the call."""
        called = {id(node.func): node for node in ast.walk(self._function) if isinstance(node, ast.Call)}
        for node in ast.walk(self._function):
            if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
                for place in self.functions(node):
                    yield place, called.get(id(node))

    def functions(self, node: ast.expr, depth: int = 0) -> Iterator[Place]:
        if depth > DEPTH_MAX:
            return
        if isinstance(node, ast.Name):
            place = self._module.names.get(node.id)
            if node.id in self._module.functions:
                yield Place(self._place.module, node.id)
            elif node.id in self._module.classes:
                yield Place(self._place.module, node.id).method("__init__")
            elif place is not None:
                found = class_at(place)
                yield found.place.method("__init__") if found else place
        elif isinstance(node, ast.Attribute):
            for owner in self.classes(node.value, depth + 1):
                yield from method_of(owner, node.attr, self._implements)
                if is_self(node.value):
                    # What a table of functions holds.
                    for value in owner.fields.get(node.attr, ()):
                        for inner in ast.walk(value):
                            if isinstance(inner, ast.Attribute) and is_self(inner.value):
                                yield from self.functions(inner, depth + 1)

    def classes(self, node: ast.expr, depth: int = 0) -> list[Class]:
        if depth > DEPTH_MAX:
            return []
        if isinstance(node, ast.Name):
            if is_self(node) and self._class is not None:
                return [self._class]
            found = [
                each for value in self._values.get(node.id, ()) for each in self.classes(value, depth + 1)
            ]
            return found or self.named(node.id)
        if isinstance(node, ast.Attribute):
            return [
                each
                for owner in self.classes(node.value, depth + 1)
                for each in self.of_field(owner, node.attr)
            ]
        if isinstance(node, ast.Call):
            return self.of_call(node, depth)
        if isinstance(node, ast.Await):
            return self.classes(node.value, depth + 1)
        if isinstance(node, ast.IfExp):
            return self.classes(node.body, depth + 1) + self.classes(node.orelse, depth + 1)
        if isinstance(node, ast.BinOp | ast.Subscript | ast.Constant):
            return classes_of(self._place.module, node, self._implements)
        return []

    def named(self, name: str) -> list[Class]:
        return classes_of(self._place.module, ast.Name(name), self._implements)

    def of_call(self, node: ast.Call, depth: int) -> list[Class]:
        if isinstance(node.func, ast.Name) and (found := self.named(node.func.id)):
            return found
        for place in self.functions(node.func, depth + 1):
            function = function_at(place)
            if function is not None and function.returns is not None:
                return classes_of(place.module, function.returns, self._implements)
        # Of a container's items, whichever function gives them.
        container = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [each for part in (*container, *node.args) for each in self.classes(part, depth + 1)]

    def of_field(self, owner: Class, name: str) -> list[Class]:
        for base in with_bases(owner):
            if name in base.fields:
                found: list[Class] = []
                for value in base.fields[name]:
                    found += classes_of(base.place.module, value, self._implements)
                return found
            if name in base.methods and (returns := base.methods[name].returns) is not None:
                return classes_of(base.place.module, returns, self._implements)
        return []


def with_bases(owner: Class) -> Iterator[Class]:
    yield owner
    for base in owner.bases:
        for each in classes_of(owner.place.module, base, {}):
            yield from with_bases(each)


def method_of(owner: Class, name: str, implements: dict[str, Place]) -> Iterator[Place]:
    for each in with_bases(owner):
        if name in each.methods:
            yield each.place.method(name)
            return


def classes_of(module_name: str, node: ast.expr, implements: dict[str, Place], depth: int = 0) -> list[Class]:
    """The classes of our own that an annotation or a constructor names."""
    module = read(module_name)
    if module is None or depth > DEPTH_MAX:
        return []
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
        node = ast.Name(node.value)
    if isinstance(node, ast.Name):
        found = class_at(module.names.get(node.id, Place(module_name, node.id)))
        if found is None and node.id in module.aliases:
            return classes_of(module_name, module.aliases[node.id], implements, depth + 1)
        if found is None:
            return []
        stand_in = class_at(implements[found.place.name]) if found.place.name in implements else None
        return [found] if stand_in is None else [found, stand_in]
    children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
    return [each for child in children for each in classes_of(module_name, child, implements, depth + 1)]


def path(
    start: Iterable[Place], target: Place, rooms: Iterable[str], implements: dict[str, Place],
    overrides: dict[Place, Place],
) -> list[Place]:  # fmt: skip
    """From one of `start` to `target` through functions of these rooms; [] where there is none."""
    trails = {place: [place] for place in start}
    pending = list(trails)
    while pending:
        place = pending.pop(0)
        function = function_at(place)
        if function is None:
            continue
        for onward, _ in Reader(place, function, implements).leads_to():
            onward = overrides.get(onward, onward)
            if onward == target:
                return [*trails[place], onward]
            if onward not in trails and onward.room in rooms:
                trails[onward] = [*trails[place], onward]
                pending.append(onward)
    return []
