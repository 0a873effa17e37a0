"""What is printed: folded by layer, in columns, and always escaped."""

import itertools as it
import os
import re
import subprocess
import sys

from hypothesis import given, strategies as st

import eqx_ckpt as ec
from eqx_ckpt._kernel._format import _text
from eqx_ckpt._kernel._tree import _folding
from eqx_ckpt._show import _terminal
from eqx_ckpt._show._lines import TreeLine


def drawn(rows, limit=None):
    return _terminal.text([TreeLine(*row) for row in rows], limit)


part = st.one_of(
    st.integers(0, 12).map(str), st.sampled_from(["w", "b", "x7", "00", "007", "-1"])
)
name = st.lists(part, min_size=1, max_size=4).map(".".join)


def unfolded(folded):
    """The names that a folded name stands for."""
    parts = []
    for part in folded.split("|"):
        run = re.fullmatch(r"\{(\d+)\.\.(\d+)\}", part)
        if run:
            parts.append([str(i) for i in range(int(run[1]), int(run[2]) + 1)])
        else:
            parts.append([part])
    return [".".join(parts) for parts in it.product(*parts)]


def split(folded):
    # The dots of `{0..31}` do not part components.
    return "|".join(re.findall(r"\{[^}]*\}|[^.]+", folded))


@given(st.lists(name, max_size=30))
def test_fold_stands_for_exactly_these_names(names):
    out = [x for folded in _folding.fold(names) for x in unfolded(split(folded))]
    assert sorted(out) == sorted(set(names))


def test_fold():
    layers = [f"layers.{i}.{x}" for i in range(32) for x in ("weight", "bias")]
    assert _folding.fold(layers) == ["layers.{0..31}.weight", "layers.{0..31}.bias"]
    assert _folding.fold(["a.0", "a.2", "a.3", "b"]) == ["a.0", "a.{2..3}", "b"]
    grid = [f"{i}.{j}" for i in range(3) for j in range(2)]
    assert _folding.fold(grid) == ["{0..2}.{0..1}"]
    assert _folding.fold(["0", "1"]) == ["{0..1}"]
    assert _folding.fold([]) == []


def test_folded_rows_are_in_the_order_of_their_first():
    rows = [("a.0.w", "x"), ("b", "y"), ("a.1.w", "x"), ("c.0", "z"), ("d", "y")]
    folded = [("a.{0..1}.w", "x"), ("b", "y"), ("c.0", "z"), ("d", "y")]
    assert _folding.fold_rows(rows) == folded


def test_fold_takes_only_indices_for_numbers():
    for names in (["a.007", "a.008"], ["a.٣", "a.٤"], ["9" * 5000], ["x1", "x2"]):
        assert _folding.fold(names) == names


def test_a_report_folds_the_layers_that_are_missing(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "a", {"w": 1.0})
    like = {"w": 1.0, "layers": [{"b": 1.0}] * 12}
    try:
        ec.tree_deserialise_leaves(tmp_path / "a", like)
    except RuntimeError as e:
        lines = str(e).splitlines()
    assert "    layers.{0..11}.b  float" in lines
    assert "Error at leaf with path" in lines[0] and "`layers.0.b`" in lines[0]


def test_tree_lines():
    rows = [
        ("a.w", "f32[2]"),
        ("layers.0.w", "f32[4]  16 B"),
        ("layers.1.w", "f32[4]  16 B"),
        ("layers.2.w", "f32[5]  20 B"),
        ("layers.4.w", "f32[5]  20 B"),
        ("zz", "int"),
    ]
    assert drawn(rows) == [
        "a",
        "  w    f32[2]",
        "layers",
        "  {0..1}",
        "    w  f32[4]  16 B",
        "  2",
        "    w  f32[5]  20 B",
        "  4",
        "    w  f32[5]  20 B",
        "zz     int",
    ]
    assert drawn([("%root", "int")]) == ["%root  int"]
    assert drawn([]) == []


def test_tree_lines_fold_whole_subtrees_and_nothing_that_differs():
    rows = [
        (f"blocks.{i}.heads.{j}.w", "f32[]") for i in range(64) for j in range(8)
    ] + [("blocks.64.heads.0.w", "f32[1]")]
    assert drawn(rows) == [
        "blocks",
        "  {0..63}",
        "    heads",
        "      {0..7}",
        "        w  f32[]",
        "  64",
        "    heads",
        "      0",
        "        w  f32[1]",
    ]
    # Not in order, with leading zeros, or too long to be an index: each on its own.
    for parts in (["1", "0"], ["00", "01"], ["9" * 5000, "1" + "0" * 5000]):
        assert len(drawn([(part, "x") for part in parts])) == 2


@given(st.lists(name, max_size=30, unique=True))
def test_tree_lines_draw_every_leaf(names):
    # Texts that all differ, so that nothing is folded.
    rows = [(name, f"<{i}>") for i, name in enumerate(names)]
    shown = [line.split("<")[1] for line in drawn(rows) if "<" in line]
    assert sorted(shown) == sorted(text[1:] for _, text in rows)


@given(st.lists(name, max_size=30, unique=True), st.integers(1, 10))
def test_tree_lines_are_limited(names, limit):
    rows = [(name, f"<{i}>") for i, name in enumerate(names)]
    whole, some = drawn(rows), drawn(rows, limit)
    if len(whole) <= limit:
        assert some == whole
    else:
        assert some[:-1] == whole[:limit]
        assert f"{len(whole) - limit} more lines" in some[-1]


def test_size():
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        1536: "1.5 KiB",
        2**20 - 1: "1.0 MiB",
        2**20: "1.0 MiB",
        1024 * 1000: "1000.0 KiB",
        2**30 - 1: "1.0 GiB",
        5 * 2**30: "5.0 GiB",
        2**40 - 1: "1.0 TiB",
        2**50 - 1: "1.0 PiB",
        2**60: "1024.0 PiB",
    }
    assert {n: _text.size(n) for n in sizes} == sizes


@given(st.integers(0, 2**60))
def test_size_is_right_to_its_last_digit(nbytes):
    number, unit = _text.size(nbytes).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(unit)
    assert abs(float(number) - nbytes / scale) <= 0.0501
    assert float(number) < 1024 or unit == "PiB"


@given(st.text())
def test_escaped_text_is_harmless_and_plain_text_is_left_alone(text):
    escaped = _text.escape(text)
    assert escaped.isprintable()
    if text.isprintable():
        assert escaped == text


def test_escape():
    assert _text.escape("\x1b[31mred\x07\n") == r"\x1b[31mred\x07\n"
    assert _text.escape("left‮right") == r"left\u202eright"
    assert _text.escape("\ud800é") == r"\ud800é"


def test_what_a_checkpoint_prints_is_escaped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    key = "b\x1b[31m\n"
    ec.tree_serialise_leaves("a\x1b[31m", {key: [1.0, 2.0]})
    ckpt = ec.open("a\x1b[31m")
    for part in (ckpt, ckpt.tree, ckpt.leaves, ckpt.tree[key], ckpt.tree[key][0]):
        assert "\x1b" not in repr(part) and r"31m" in repr(part)
    assert r"a\x1b[31m: 2 leaves, 16 B)" in repr(ckpt)


def test_short_dtype():
    dtypes = {
        "bool": "bool",
        "float32": "f32",
        "bfloat16": "bf16",
        "float8_e4m3fn": "f8_e4m3fn",
        "float8_e4m3b11fnuz": "f8_e4m3b11fnuz",
        "float4_e2m1fn": "f4_e2m1fn",
        "float0": "f0",
        "complex64": "c64",
        "uint4": "u4",
        "int64": "i64",
        "key": "key",
        "int": "int",
        "str": "str",
    }
    assert {x: _folding.short_dtype(x) for x in dtypes} == dtypes
    assert _folding.short_array("float32", (64, 3)) == "f32[64,3]"
    assert _folding.short_array("bool", ()) == "bool[]"


def test_the_command_line_in_pipes_and_on_terminals(tmp_path):
    ec.tree_serialise_leaves(tmp_path / "é", {f"w{i}": i for i in range(5000)})
    command = [sys.executable, "-m", "eqx_ckpt", "ls", str(tmp_path / "é")]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=env) as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0 and b"\\xe9  5,000 leaves" in line
