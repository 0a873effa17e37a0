"""References of docstrings: [`open`][] means the public name `eqx_ckpt.open`."""

import inspect
import operator
import re
from typing import Any

import griffe

import eqx_ckpt
from eqx_ckpt._kernel._runtime import _arguments


DEFAULTS = {
    "_leaf.is_storable": "is_storable",
    "TIMEOUT": str(_arguments.TIMEOUT),
}


class References(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        # The stub has names for its annotations too.
        for name in eqx_ckpt.__all__:
            self._visit(pkg.members[name], "eqx_ckpt", pkg)

    def _visit(self, member: Any, path: str, pkg: griffe.Module) -> None:
        target = member.final_target if member.is_alias else member
        here = f"{path}.{member.name}"
        if target.docstring:
            text = re.sub(
                r"\[`(?:ec\.)?([\w.]+)`\]\[\]",
                lambda match: self._link(match[1], target, here, pkg),
                target.docstring.value,
            )
            target.docstring.value = text
        parameters = getattr(target, "parameters", [])
        if any("Unpack" in str(parameter.annotation) for parameter in parameters):
            _expand(parameters, here)
        for parameter in parameters:
            # A default that is a private constant: its value says more.
            default = str(parameter.default)
            parameter.default = DEFAULTS.get(default, parameter.default)
        if target.is_class or target.is_module:
            for name, child in target.members.items():
                # A class has no names of others; a module gives on some of its own.
                is_own = not child.is_alias or target.is_module
                if is_own and not name.startswith("_"):
                    self._visit(child, here, pkg)

    def _link(self, name: str, target: Any, here: str, pkg: griffe.Module) -> str:
        owner = target if target.is_class else target.parent
        first = name.split(".")[0]
        if first in pkg.members:
            path = f"eqx_ckpt.{name}"
        elif owner is not None and first in owner.members:
            path = f"{here if target.is_class else here.rpartition('.')[0]}.{name}"
        else:
            return f"[`{name}`][]"
        return f"[`{name}`][{path}]"


def _expand(parameters: griffe.Parameters, path: str) -> None:
    """Lists keywords that are unpacked, as `help` does."""
    call = operator.attrgetter(path.removeprefix("eqx_ckpt."))(eqx_ckpt)
    packed = next(x.name for x in parameters if "Unpack" in str(x.annotation))
    del parameters[packed]
    kind = griffe.ParameterKind.keyword_only
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in parameters:
            default = repr(parameter.default)
            parameters.add(griffe.Parameter(name, kind=kind, default=default))
