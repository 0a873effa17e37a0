"""docs/coming.md is one program, and does what it says."""

import pathlib
import re

import eqx_ckpt as ec


page = (pathlib.Path(__file__).parents[2] / "docs" / "coming.md").read_text()
fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def test_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "coming"}
    for language, text in fenced:
        if language == "python":
            exec(compile(text, "coming.md", "exec"), names)
    for line in re.findall(r"^([^\n=]+)  # (LazyArray\(.*\))$", page, re.MULTILINE):
        assert repr(eval(line[0], {"ckpt": ec.open("model.safetensors")})) == line[1]
    assert ec.open("all.safetensors").metadata == {"format": "pt"}
