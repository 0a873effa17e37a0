"""Names and shapes of the leaves of well-known models, as several libraries spell them.

A row of a table in `architectures.txt` is one layer: its kind, then its name in each
library. `{i}` and `{j}` count from 0, `{i1}` and `{j1}` from 1. A name that ends in `!`
has no bias there, and `-` says that the library has no such layer.
"""

import pathlib
import random
import re


D, F, V, T, K = 8, 24, 31, 9, 4

_SPELLINGS = {
    "torch": dict(weight="weight", bias="bias", mean="running_mean", var="running_var"),
    "eqx": dict(weight="weight", bias="bias", mean="running_mean", var="running_var"),
    "flax": dict(weight="kernel", bias="bias", mean="mean", var="var"),
    "haiku": dict(weight="w", bias="b", mean="mean", var="var"),
}
_SCALES = {"flax": "scale", "haiku": "scale"}
_TABLES = {"flax": "embedding", "haiku": "embeddings"}


def _tables():
    """By name: how each library spells its leaves, how many inner layers there are in
    one, and the rows."""
    text = pathlib.Path(__file__).with_suffix(".txt").read_text()
    out = {}
    for line in text.splitlines()[1:]:
        cells = [x.strip() for x in line.split("|")]
        if line.startswith("["):
            name, _, styles = cells[0][1:].partition("] ")
            rows = []
            out[name] = styles.split(), int(cells[1]), rows
        elif line:
            rows.append(cells)
    return out


TABLES = _tables()


def _leaves(kind, sizes, name, style):
    """The leaves of one layer, each with what it is called in all libraries."""
    name, has_bias = name.removesuffix("!"), not name.endswith("!")
    base = "torch" if style == "conv1d" else style
    words = dict(_SPELLINGS[base])
    if kind == "par":
        return {"": (name, tuple(sizes))}
    shape = tuple(sizes)
    if kind in ("norm", "rms", "bn"):
        words["weight"] = _SCALES.get(style, "weight")
        words["bias"] = "offset" if style == "haiku" else words["bias"]
    elif kind == "emb":
        words["weight"] = _TABLES.get(style, "weight")
    elif style in ("flax", "haiku") or (style == "conv1d" and kind in ("lin", "mat")):
        shape = (*shape[2:], shape[1], shape[0])
    out = {"weight": (f"{name}.{words['weight']}", shape)}
    if kind in ("lin", "conv", "norm", "bn") and has_bias:
        axes = (1,) * (len(shape) - 2) if style == "eqx" and kind == "conv" else ()
        out["bias"] = f"{name}.{words['bias']}", (sizes[0], *axes)
    if kind == "bn":
        out |= {x: (f"{name}.{words[x]}", shape) for x in ("mean", "var")}
    return out


def spelled(table, library, layers=3):
    """The leaves of a model as a library has them: its shape, by what it is. And the
    rows whose names have numbers that count no layers."""
    styles, inner, rows = TABLES[table]
    out, numbered = {}, set()
    for number, (kind, *names) in enumerate(rows):
        name = names[library]
        plain = re.sub(r"{\w+}", "", name)
        if re.search(r"\d", plain) or styles[library] == "haiku":
            numbered.add(number)
        if name == "-":
            continue
        call, _, sizes = kind.rstrip(")").partition("(")
        one = any("{i" in x for x in names)
        for i in range(layers if one else 1):
            for j in range(inner if any("{j" in x for x in names) else 1):
                scope = dict(D=D, F=F, V=V, T=T, K=K, i=i, j=j, max=max)
                dims = eval(f"({sizes},)" if sizes else "()", scope)
                full = name.format(i=i, j=j, i1=i + 1, j1=j + 1)
                style = styles[library]
                for role, leaf in _leaves(call, dims, full, style).items():
                    out[number, i, j, role] = leaf
    return out, numbered


def _renumbered(leaves, rng):
    """With other numbers where some count: from 1, from 0, or with others between."""
    values = {}
    for name, _ in leaves.values():
        parts = re.split(r"(\d+)", name)
        for at in range(1, len(parts), 2):
            key = "".join(parts[:at])
            values.setdefault(key, set()).add(int(parts[at]))
    # One way for all that have the same name but for the numbers before.
    fold = lambda x: re.sub(r"\d+", "*", x)
    seen = {}
    for key, some in values.items():
        seen.setdefault(fold(key), []).append(some)
    ways = {}
    for key, some in seen.items():
        least = min(map(min, some))
        ways[key] = rng.choice([0, 0, 1 - 2 * least if least < 2 else 0, 7])
    named = {}
    for what, (name, shape) in leaves.items():
        parts = re.split(r"(\d+)", name)
        new = list(parts)
        for at in range(1, len(parts), 2):
            key = fold("".join(parts[:at]))
            # Haiku leaves out the first number.
            several = len(max(seen[key], key=len)) > 1 and not key.endswith("_")
            number, way = int(parts[at]), ways[key]
            apart = key.endswith(".") and not parts[at + 1].startswith("_")
            if several and way == 7 and apart and min(map(min, seen[key])) == 0:
                new[at] = str(2 * number)
            elif several and way in (1, -1):
                new[at] = str(number + way)
        named[what] = "".join(new), shape
    return named


_WRAPS = ["", ""]
_WRAPS += "model. module. net. state_dict. params. model.0. policy.".split()
_LONGER = """
    attn attention, norm layernorm, emb embedding, conv convolution, mlp feed_forward,
    proj projection, embed embeddings, fc linear, layers blocks, blocks layers,
    h layers, out output
"""
_LONGER = dict(x.split() for x in _LONGER.split(","))


def _renamed(leaves, rng):
    """With other words for the same things."""
    chosen = {x for x in _LONGER if rng.random() < 0.25}
    some = lambda m: _LONGER[m[0]] if m[0] in chosen else m[0]
    new = {
        what: (re.sub(r"(?<![A-Za-z])[a-z]+(?![A-Za-z])", some, name), shape)
        for what, (name, shape) in leaves.items()
    }
    names = [x for x, _ in new.values()]
    return new if len({*names}) == len(names) else leaves


def case(seed):
    """Names with shapes of two spellings of one model, and which are the same."""
    rng = random.Random(seed)
    table = rng.choice(sorted(TABLES))
    count = len(TABLES[table][0])
    both = [rng.randrange(count), rng.randrange(count)]
    layers = rng.choice([1, 2, 3, 3, 3])
    fewer = layers - 1 if layers > 1 and rng.random() < 0.1 else layers
    sides, numbered = [], set()
    for library, n in zip(both, rng.sample([layers, fewer], 2)):
        leaves, some = spelled(table, library, n)
        numbered |= some
        if rng.random() < 0.6:
            leaves = _renumbered(leaves, rng)
        if rng.random() < 0.5:
            leaves = _renamed(leaves, rng)
        sides.append(leaves)
    for leaves in sides:
        rows = sorted({x[0] for x in leaves} - numbered)
        if rng.random() < 0.3 and len(rows) > 2:
            gone = rng.choice(rows)
            for what in [x for x in leaves if x[0] == gone]:
                del leaves[what]
    shapes = []
    for leaves in sides:
        wrap = rng.choice(_WRAPS)
        items = [(what, (wrap + name, shape)) for what, (name, shape) in leaves.items()]
        rng.shuffle(items)
        shapes.append(dict(items))
    a, b = shapes
    truth = {name: b[what][0] for what, (name, _) in a.items() if what in b}
    label = f"{table} {both} seed {seed}"
    return (
        label,
        *({name: ("array of f", s) for name, s in x.values()} for x in (a, b)),
        truth,
    )
