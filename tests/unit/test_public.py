"""What a reader can count on in every module: words, size, names that exist, and nothing that should not be there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest
from sources import foreign_imports, modules, texts, tree

NAMES = list(modules())
MAX_LINES = 420
#: Files that stand for a user's own script: they run as a rank, and print.
USER_SCRIPTS = ("demo.regression",)
#: Hubs and registries, in halves: this file may not name them either.
_HOSTS = (("huggingface", "co"), ("hf", "co"), ("pypi", "org"), ("pythonhosted", "org"), ("modelscope", r"\w+"))
HOSTS = re.compile("|".join(rf"\b{name}\.{end}\b" for name, end in (*_HOSTS, ("crates", "io"), ("npmjs", r"\w+"))))

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def public(body: list[ast.stmt], within: str) -> Iterator[tuple[str, Definition]]:
    """Public functions and classes, and the public methods of public classes that give a word its meaning here."""
    for node in body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        yield f"{within}.{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public(node.body, f"{within}.{node.name}")


def explained_elsewhere(node: Definition, owner: ast.ClassDef | None) -> bool:
    """Overloads, setters, and methods that carry out what a documented base or protocol says."""
    if isinstance(node, ast.ClassDef):
        return False
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    return bool(decorators & {"overload", "override", "setter"}) or (owner is not None and bool(owner.bases))


def classes(name: str) -> dict[str, ast.ClassDef]:
    return {path: node for path, node in public(tree(name).body, name) if isinstance(node, ast.ClassDef)}


def _of_protocol(path: str, owners: dict[str, ast.ClassDef]) -> bool:
    """Whether the class says that it is another one, whose words need not be repeated."""
    owner = owners.get(path.rpartition(".")[0])
    return owner is not None and re.search(r"`muster\.[\w.]+`", ast.get_docstring(owner) or "") is not None


def test_a_module_says_what_it_is_for() -> None:
    first = {name: (ast.get_docstring(tree(name)) or "").partition("\n")[0].rstrip() for name in NAMES}
    assert [(name, line) for name, line in first.items() if not line or line[-1] not in ".:!?"] == []


def test_what_is_public_is_explained() -> None:
    missing: list[str] = []
    for name in NAMES:
        if name in USER_SCRIPTS:
            continue
        owners = classes(name)
        for path, node in public(tree(name).body, name):
            if ast.get_docstring(node) is not None or _of_protocol(path, owners):
                continue
            if not explained_elsewhere(node, owners.get(path.rpartition(".")[0])):
                missing.append(path)
    assert missing == []


@pytest.mark.parametrize("name", [name for name in NAMES if "__all__" in modules()[name].read_text(encoding="utf-8")])
def test_exported_names_exist_once(name: str) -> None:
    module = importlib.import_module(f"muster.{name}".rstrip("."))
    exported: list[str] = list(module.__all__)
    assert [item for item in exported if not hasattr(module, item)] == []
    assert len(set(exported)) == len(exported)


def test_a_module_is_short_enough_to_read() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}


def test_nothing_prints() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name in NAMES
        if name not in USER_SCRIPTS
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert found == []


def test_nothing_is_pickled() -> None:
    pickles = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
    assert [name for name in NAMES if foreign_imports(name) & pickles] == []


def test_no_error_is_swallowed_by_a_bare_except() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name in NAMES
        for node in ast.walk(tree(name))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert found == []


def test_no_host_of_a_hub_and_no_path_of_a_machine_is_written_down() -> None:
    for name in NAMES:
        assert HOSTS.findall(modules()[name].read_text(encoding="utf-8")) == [], name
        assert [text for text in texts(name) if re.match(r"/(home|Users|work|root)/", text)] == [], name
