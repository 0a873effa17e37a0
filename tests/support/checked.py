"""With `-p support.checked`, every call in the tests checks the types of the package.

Functions in functions are left out: each would be decorated anew whenever the outer one
is called, which takes longer than all else that most tests do.
"""

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType

import pytest
from beartype import beartype, BeartypeConf


def pytest_configure(config: pytest.Config) -> None:
    # Beartype looks at an element of a list that it chooses by `random`.
    text = "ignore:Do not use the `random` module inside strategies"
    config.addinivalue_line("filterwarnings", text)


check = beartype(conf=BeartypeConf(violation_type=TypeError))
_CHECK = ast.parse("__import__('support.checked').checked.check", mode="eval").body
_functions = ast.FunctionDef, ast.AsyncFunctionDef


def _decorate(body: list[ast.stmt]) -> None:
    for node in body:
        if isinstance(node, _functions):
            # Beartype knows no `*args: P.args`.
            if not isinstance(
                getattr(node.args.vararg, "annotation", 0), ast.Attribute
            ):
                node.decorator_list.append(_CHECK)
        elif isinstance(node, ast.ClassDef):
            _decorate(node.body)
            if any("dataclass" in ast.unparse(x) for x in node.decorator_list):
                node.decorator_list.insert(0, _CHECK)  # Its `__init__` is made.
        elif isinstance(node, (ast.If, ast.Try)):
            _decorate(node.body + node.orelse)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        _decorate(tree.body)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder("eqx_ckpt"))
