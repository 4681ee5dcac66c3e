"""Finds classes and methods in the source of mlx-lm's models, and what `shard` divides. Nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

#: How far a name may lead from class to class before it is given up.
_DEEPEST: Final = 8
#: Functions that divide the parameters of a module, their first argument. The last is `muse_spark`'s own.
_SHARDING: Final = frozenset({"shard_linear", "shard_inplace", "shard_experts_inplace"})
#: A module's own arrays; it is the module that `shard` divides.
_PARAMETERS: Final = frozenset({"weight", "bias", "scales", "biases"})


class Class(msgspec.Struct, frozen=True):
    """A class, and the module of mlx-lm that it is written in."""

    module: str
    node: ast.ClassDef


class Method(msgspec.Struct, frozen=True):
    """A method, and the module that it is written in."""

    module: str
    node: ast.FunctionDef

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of its arguments."""
        return tuple(one.arg for one in (*self.node.args.args, *self.node.args.kwonlyargs))


def parse(file: Path) -> ast.Module:
    """The syntax tree of a file; an empty one where it cannot be read."""
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


class Source:
    """The modules below a directory, read when they are first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._trees: dict[str, ast.Module] = {}
        self._texts: dict[str, str] = {}

    def text(self, module: str) -> str:
        """The source of a module, empty where there is none."""
        if module not in self._texts:
            file = self._directory / f"{module}.py"
            self._texts[module] = file.read_text(encoding="utf-8") if file.is_file() else ""
        return self._texts[module]

    def family(self, module: str) -> tuple[str, ...]:
        """The module, and those beside it that define a `Model` which it builds upon."""
        others = {
            name
            for statement in self._tree(module).body
            if isinstance(statement, ast.ImportFrom) and statement.level == 1
            for name in ([statement.module] if statement.module else [alias.name for alias in statement.names])
        }
        models = [name for name in sorted(others) if "Model" in self.classes(name)]
        return (module, *models)

    def classes(self, module: str) -> tuple[str, ...]:
        """The names of the classes that a module defines."""
        return tuple(one.name for one in self._tree(module).body if isinstance(one, ast.ClassDef))

    def class_text(self, module: str, name: str) -> str:
        """The source of a class that a module defines."""
        found = self.find_class(module, name)
        return ast.unparse(found.node) if found is not None else ""

    def find_class(self, module: str, name: str, depth: int = 0) -> Class | None:
        """The class that a module calls `name`, wherever it is written."""
        if depth > _DEEPEST:
            return None
        for statement in self._tree(module).body:
            match statement:
                case ast.ClassDef() if statement.name == name:
                    return Class(module, statement)
                case ast.ImportFrom(module=str(other), level=1):
                    for alias in statement.names:
                        if (alias.asname or alias.name) == name:
                            return self.find_class(other, alias.name, depth + 1)
                case _:
                    pass
        return None

    def method(self, found: Class, name: str, depth: int = 0) -> Method | None:
        """The method of a class, its own or inherited."""
        for statement in found.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return Method(found.module, statement)
        if depth > _DEEPEST:
            return None
        for base in found.node.bases:
            parent = self._resolve(found.module, base)
            if parent is not None and (inherited := self.method(parent, name, depth + 1)) is not None:
                return inherited
        return None

    def lineage(self, found: Class) -> tuple[str, ...]:
        """The modules that a class and those it inherits from are written in."""
        parents = (self._resolve(found.module, base) for base in found.node.bases)
        return (found.module, *(module for parent in parents if parent is not None for module in self.lineage(parent)))

    def attribute(self, found: Class, name: str, depth: int = 0) -> Class | None:
        """The class of the object that a class keeps as `self.name`: made in `__init__`, or given by a property."""
        if depth > _DEEPEST:
            return None
        if (given := self.method(found, name)) is not None:
            for statement in ast.walk(given.node):
                if isinstance(statement, ast.Return) and (path := _path(statement.value))[:1] == ["self"]:
                    here: Class | None = found
                    for step in path[1:]:
                        here = self.attribute(here, step, depth + 1) if here is not None else None
                    return here
            return None
        last: Class | None = None
        for entry in found.node.body:
            if isinstance(entry, ast.FunctionDef) and entry.name == "__init__":
                for statement in ast.walk(entry):
                    if (
                        isinstance(statement, ast.Assign)
                        and _path(statement.targets[0]) == ["self", name]
                        and isinstance(statement.value, ast.Call)
                    ):
                        last = self._resolve(found.module, statement.value.func) or last
        for base in found.node.bases if last is None else ():
            parent = self._resolve(found.module, base)
            if parent is not None and (inherited := self.attribute(parent, name, depth + 1)) is not None:
                return inherited
        return last

    def with_delegates(self, method: Method) -> tuple[ast.FunctionDef, ...]:
        """A method, and those of the same name that it calls on other classes."""
        found = [method.node]
        for call in ast.walk(method.node):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr == method.node.name
            ):
                other = self._resolve(method.module, call.func.value)
                if other is not None and (delegate := self.method(other, method.node.name)) is not None:
                    found.append(delegate.node)
        return tuple(found)

    def default_of(self, module: str, field: str) -> bool | None:
        """The default of a boolean field of the module's argument classes; `None` where there is no such field."""
        found = self._field(module, field)
        return None if found is None else isinstance(found, ast.Constant) and found.value is True

    def whole_default_of(self, module: str, field: str) -> int | None:
        """The default of such a field if it is a whole number; `None` where there is none."""
        found = self._field(module, field)
        return found.value if isinstance(found, ast.Constant) and type(found.value) is int else None

    def has_field(self, module: str, field: str) -> bool:
        """Whether the module's argument classes have such a field."""
        return self._field(module, field) is not None

    def _field(self, module: str, field: str) -> ast.expr | None:
        """The default of a field of an argument class; an ellipsis where it has none."""
        for name in self.family(module):
            for statement in self._tree(name).body:
                for entry in statement.body if isinstance(statement, ast.ClassDef) else ():
                    if isinstance(entry, ast.AnnAssign) and _path(entry.target) == [field]:
                        return entry.value if entry.value is not None else ast.Constant(...)
        return None

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = parse(self._directory / f"{module}.py")
        return self._trees[module]

    def _resolve(self, module: str, expression: ast.expr) -> Class | None:
        """The class that an expression in a module names, `Name` or `module.Name`."""
        match _path(expression):
            case [name]:
                return self.find_class(module, name)
            case [other, name]:
                return self.find_class(other, name)
            case _:
                return None


def divided_names(methods: Iterable[ast.FunctionDef]) -> tuple[frozenset[str], frozenset[str]]:
    """What methods `shard` divide: the names of modules and arrays, and those of them whose output is summed."""
    divided: set[str] = set()
    summed: set[str] = set()
    for method in methods:
        origins: dict[str, str] = {}
        for statement in ast.walk(method):
            match statement:
                case ast.Call():
                    if (name := _divided_by(statement)) is not None:
                        divided.add(name)
                        if "sharded-to-all" in ast.unparse(statement):
                            summed.add(name)
                case ast.Assign(targets=[ast.Name(id=local)]):
                    origins[local] = _leaf(statement.value)
                case ast.Assign(targets=[ast.Attribute() as target]) if _takes_a_part(statement.value):
                    divided.add(_array(target, origins))
                case _:
                    pass
    return frozenset(divided), frozenset(summed)


def _divided_by(call: ast.Call) -> str | None:
    """The module that a call divides, if it does."""
    path = _path(call.func)
    if path and path[-1] in _SHARDING and call.args:
        return _leaf(call.args[0])
    if path and path[-1] == "apply" and len(path) > 2:
        return path[-2]
    if "from_rms_norm" in path and call.args:
        return _leaf(call.args[0])
    return None


def _array(target: ast.Attribute, origins: dict[str, str]) -> str:
    """The name of an array, or of the module whose weight it is."""
    if target.attr not in _PARAMETERS:
        return target.attr
    parent = _leaf(target.value)
    return origins.get(parent, parent)


def _takes_a_part(value: ast.expr) -> bool:
    return any(isinstance(one, ast.Subscript) for one in ast.walk(value))


def _leaf(expression: ast.expr) -> str:
    while isinstance(expression, ast.Subscript):
        expression = expression.value
    return (_path(expression) or [""])[-1]


def _path(expression: ast.expr | None) -> list[str]:
    """`a.b.c` as its names; empty for any other expression."""
    match expression:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            before = _path(value)
            return [*before, name] if before else []
        case _:
            return []
