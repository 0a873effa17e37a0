"""Writes `eqx_ckpt/__init__.pyi`: `python tests/project/stubs.py`.

An editor that does not run the code shows no keyword that is unpacked of a `TypedDict`.
The stub has each of them. `test_hints.py` holds that it is that of the code.
"""

import ast
import functools as ft
import importlib
import inspect
import pathlib
from collections.abc import Iterator
from typing import Any

import eqx_ckpt as ec


STUB = pathlib.Path(ec.__file__).with_suffix(".pyi")
_HEAD = [
    "# Made by tests/project/stubs.py, of the code.",
    "from ._version import __version__ as __version__",
]
# Methods that have such keywords, of classes that are as they are otherwise.
_METHODS = {"CheckpointManager": ["__init__", "restore"]}


class _Module:
    """A module of the package: what it defines, and where its other names are from."""

    def __init__(self, name: str):
        self.name = name
        file = inspect.getsourcefile(importlib.import_module(f"eqx_ckpt.{name}"))
        assert file is not None
        self.body = ast.parse(pathlib.Path(file).read_text()).body
        self.definitions: dict[str, ast.stmt] = {}
        # The module, below this package or whole, and what it is called there.
        self.imports: dict[str, tuple[str, str]] = {}
        for line in self.body:
            if isinstance(line, ast.FunctionDef | ast.ClassDef):
                self.definitions[line.name] = line
            elif isinstance(line, ast.Assign):
                self.definitions[ast.unparse(line.targets[0])] = line
            elif isinstance(line, ast.ImportFrom):
                above = name.split(".")[: -line.level] if line.level else []
                home = ".".join([*above, str(line.module)])
                for x in line.names:
                    self.imports[x.asname or x.name] = (
                        f".{home}" if line.level else home,
                        x.name,
                    )

    def home(self, name: str) -> "tuple[_Module, str]":
        """The module of the package that defines a name, and its name there."""
        if name in self.definitions:
            return self, name
        home, own = self.imports[name]
        return _module(home.lstrip(".")), own


_module = ft.cache(_Module)


class _Stub:
    def __init__(self) -> None:
        self.imports: set[str] = set()

    def said(self, node: ast.expr, module: _Module) -> str:
        """An annotation as the module has it. Its names are imported."""
        for name in {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}:
            if name in module.definitions:
                self.imports.add(f"from .{module.name} import {name}")
            elif name in module.imports:
                home, own = module.imports[name]
                self.imports.add(f"from {home} import {own}")
            elif name == "os":
                self.imports.add("import os")
        return ast.unparse(node)

    def call(self, node: ast.FunctionDef, call: Any, module: _Module, at: str) -> str:
        given = node.args
        annotations = {
            x.arg: (x.annotation, module)
            for x in [*given.posonlyargs, *given.args, *given.kwonlyargs]
        }
        assert given.kwarg is not None and given.kwarg.annotation is not None
        packed = ast.unparse(given.kwarg.annotation)
        of_keywords = dict(_fields(packed[len("Unpack[") : -1], module))
        defaults = {*_defaults(given), *of_keywords.keys() - annotations}
        lines = []
        for name, x in inspect.signature(call).parameters.items():
            if x.kind is x.KEYWORD_ONLY and "*" not in lines:
                lines.append("*")
            annotation, home = {**of_keywords, **annotations}[name]
            text = (
                name if annotation is None else f"{name}: {self.said(annotation, home)}"
            )
            lines.append(f"{text} = {_shown(x.default)}" if name in defaults else text)
        arguments = "".join(f"{at}    {x},\n" for x in lines)
        returns = self.said(node.returns, module) if node.returns else "None"
        return f"{at}def {node.name}(\n{arguments}{at}) -> {returns}: ...\n"

    def methods(self, node: ast.ClassDef, module: _Module) -> str:
        self.imports.add(f"from .{module.name} import {node.name} as _{node.name}")
        text = f"class {node.name}(_{node.name}):\n"
        for name in _METHODS[node.name]:
            found = [
                x
                for x in node.body
                if isinstance(x, ast.FunctionDef) and x.name == name
            ]
            call = getattr(getattr(ec, node.name), name)
            for line in found[:-1] or found:
                if len(found) > 1:
                    self.imports.add("from typing import overload")
                    text += "    @overload\n"
                text += self.call(line, call, module, "    ")
        return text


def _defaults(given: ast.arguments) -> Iterator[str]:
    """The names of arguments that have a default."""
    order = [*given.posonlyargs, *given.args]
    yield from (x.arg for x in order[len(order) - len(given.defaults) :])
    yield from (x.arg for x, y in zip(given.kwonlyargs, given.kw_defaults) if y)


def _shown(default: Any) -> str:
    is_plain = default is None or isinstance(default, bool | int | float | str | tuple)
    return repr(default) if is_plain else "..."


def _fields(
    name: str, module: _Module
) -> Iterator[tuple[str, tuple[ast.expr, _Module]]]:
    """The annotations of a `TypedDict`, each with the module that it is written in."""
    module, name = module.home(name)
    node = module.definitions[name]
    assert isinstance(node, ast.ClassDef)
    for base in map(ast.unparse, node.bases):
        if base != "TypedDict":
            yield from _fields(base, module)
    for line in node.body:
        if isinstance(line, ast.AnnAssign):
            yield ast.unparse(line.target), (line.annotation, module)


def made() -> str:
    """The text of the stub."""
    stub, parts = _Stub(), []
    lines = [*_HEAD, *(f"from . import {x} as {x}" for x in ("adapters", "merging"))]
    for home, names in vars(ec)["_NAMES"].items():
        for name in names.split() if home not in names else []:
            module = _module(home)
            node = module.definitions[name]
            if isinstance(node, ast.ClassDef) and name in _METHODS:
                parts.append(stub.methods(node, module))
            elif isinstance(node, ast.FunctionDef) and "Unpack" in ast.unparse(node):
                parts.append(stub.call(node, getattr(ec, name), module, ""))
            else:
                lines.append(f"from .{home} import {name} as {name}")
    given_on = {line.partition(" as ")[0] for line in lines}
    return "\n".join([*lines, *sorted(stub.imports - given_on), "", *parts])


if __name__ == "__main__":
    STUB.write_text(made())
