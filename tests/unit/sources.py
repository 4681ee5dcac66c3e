"""The source of muster as syntax trees, for the tests of its architecture."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import muster

ROOT = Path(muster.__file__).parent


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name inside it: "state", "group.scope", "" for the package itself."""
    found: dict[str, Path] = {}
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        if "__pycache__" in relative.parts:
            continue
        found[".".join(part for part in relative.with_suffix("").parts if part != "__init__")] = path
    return found


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(modules()[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Every module that `name` imports, at the top or inside a function, but not for the type checker only."""
    for node in _at_run_time(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"muster.{name} has a relative import in line {node.lineno}"
            module = node.module or ""
            # `from muster.coordinator import intake` imports a module, `from muster.state import State` a name.
            for alias in node.names:
                inner = f"{module}.{alias.name}".removeprefix("muster.")
                yield f"{module}.{alias.name}" if module.startswith("muster") and inner in modules() else module


def own_imports(name: str) -> set[str]:
    """The modules of muster that `name` imports, by their names inside the package."""
    return {found.removeprefix("muster").lstrip(".") for found in imports(name) if found.split(".")[0] == "muster"}


def foreign_imports(name: str) -> set[str]:
    """The top-level packages other than muster that `name` imports."""
    return {found.split(".")[0] for found in imports(name)} - {"muster", "__future__"}


def texts(name: str) -> Iterator[str]:
    """Every string of the module that is not a docstring."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_run_time(child)
