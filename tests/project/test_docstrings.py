"""The examples in the docstrings of all public names run, and say the truth."""

import doctest
import inspect
import re

import pytest

import eqx_ckpt as ec


def _public(owner) -> dict:
    return {
        name: value
        for name, value in vars(owner).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


modules = {
    f"{module}.{name}": value
    for module in ("adapters", "merging")
    for name, value in _public(getattr(ec, module)).items()
    if value.__module__ == f"eqx_ckpt.{module}" and inspect.isfunction(value)
}
named = {name: getattr(ec, name) for name in ec.__all__}
public = {x: named[x] for x in named if not inspect.ismodule(named[x])} | modules
methods = {
    f"{name}.{method}": value
    for name, owner in public.items()
    if inspect.isclass(owner)
    for method, value in _public(owner).items()
    if inspect.isroutine(value) or isinstance(value, property)
}


def _examples(name) -> list[doctest.Example]:
    text = inspect.getdoc({**public, **methods}[name]) or ""
    return doctest.DocTestParser().get_examples(text, name)


functions = [name for name, value in public.items() if inspect.isroutine(value)]
with_examples = [name for name in {**public, **methods} if _examples(name)]


def test_the_public_names():
    assert {"open", "materialise", "Checkpoint", "LazyArray"} <= set(public)
    assert {"Checkpoint.splice", "Checkpoint.leaves", "LazyArray.read"} <= set(methods)
    # What a star import would give, and nothing that leaked into the package.
    for name, value in public.items():
        assert value.__module__.startswith("eqx_ckpt."), name


@pytest.mark.parametrize("name", functions)
def test_functions_have_examples(name):
    assert _examples(name)


@pytest.mark.parametrize("name", functions)
def test_arguments_are_described(name):
    _, section, text = public[name].__doc__.partition("**Arguments:**")
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"- (`.*?):", text))))
    # `options` may be those of another call, which the signature lists.
    written = set(inspect.signature(inspect.unwrap(public[name])).parameters)
    parameters = set(inspect.signature(public[name]).parameters)
    # A sentence does for a function of one argument.
    assert named in (parameters, written) or (not section and len(parameters) <= 1)


@pytest.mark.parametrize("name", with_examples)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    test = doctest.DocTest(_examples(name), {}, name, None, None, None)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)
