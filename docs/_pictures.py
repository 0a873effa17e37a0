"""Draws docs/pictures/parts.svg: `python docs/_pictures.py`.

What it shows is not made up: a tree is saved here, and a part of it is loaded.
"""

import html
import pathlib
import tempfile

import equinox as eqx
import jax
import jax.random as jr

import eqx_ckpt as ec


WIDTH, HEIGHT, LINE = 980, 250, 19
INK, FAINT, ACCENT, LIGHT = "#24292f", "#6e7781", "#00796b", "#d9efec"


def net(key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(256, 256, 256, depth=2, key=key)


def _size(number: int) -> str:
    return f"{number / 1024:.0f} KiB"


def _columns() -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """A title, a line of code, and lines: each a text, and whether it is loaded."""
    key = jr.key(0)
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "ckpt")
        ec.tree_serialise_leaves(path, {"model": net(key), "step": 7})
        ckpt = ec.open(path)
        names = list(ckpt.leaves)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        named = [str(file.relative_to(path)) for file in files]
        sizes = {name: file.stat().st_size for name, file in zip(named, files)}
        like = eqx.filter_eval_shape(net, key)
        with ec.counting() as bytes_read:
            part = ec.tree_deserialise_leaves(
                ckpt, like, source="model", where=lambda m: m.layers[1]
            )
        unread = set(ec.unloaded(part))
        read, whole = _size(bytes_read()), _size(ckpt.nbytes)
    is_read = {name: name.removeprefix("model.") not in unread for name in names}
    is_read["step"] = False
    (data,) = (name for name in sizes if name.endswith("/0"))
    save = data.split("/")[1]
    tree = ["MLP(", "  layers=("]
    for i in range(3):
        tree.append(f"    Linear(weight, bias){',' if i < 2 else ''}")
    tree += ["  ),", "  width_size=256, ...", ")"]
    rows = [("eqx_ckpt.json", "names, shapes: the index")]
    rows += [(f"d/{save}/0", f"all arrays: {_size(sizes[data])}")]
    rows += [(f"d/{save}/digests", "checked as they are read")]
    rows += [("_METADATA, ...", "for other readers")]
    listing = []
    for name, what in rows:
        listing.append((name.replace(save, "<save>"), name == data))
        listing.append((f"  {what}", False))
    loaded = []
    for i in range(3):
        is_here = is_read[f"model.layers.{i}.weight"]
        loaded.append(
            (f"m.layers[{i}]  {'weights' if is_here else 'abstract'}", is_here)
        )
    loaded += [("", False), (f"{read} of {whole}", False), ("were read", False)]
    return [
        (
            "A tree",
            '{"model": model, "step": 7}',
            [(line, "Linear" in line and line is tree[3]) for line in tree],
        ),
        ("Names", "tree_serialise_leaves", list(is_read.items())),
        ("Files", "what lies at the path", listing),
        ("One part of it", "where=lambda m: m.layers[1]", loaded),
    ]


def draw() -> str:
    """The picture, as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="A tree, the names '
        'of its leaves, the files that hold them, and one part of it loaded">',
        "<style>text{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
        ".title{font:600 16px system-ui,sans-serif}.code{font-size:11px}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#fff"/>',
    ]
    lefts, widths = [16, 246, 498, 748], [206, 228, 226, 216]
    for (title, code, lines), left, width in zip(_columns(), lefts, widths):
        parts.append(
            f'<rect x="{left}" y="66" width="{width}" height="{HEIGHT - 82}" rx="6" '
            'fill="#f6f8fa" stroke="#d0d7de"/>'
            f'<text class="title" x="{left}" y="32" fill="{INK}">{title}</text>'
            f'<text class="code" x="{left}" y="54" fill="{FAINT}">'
            f"{html.escape(code)}</text>"
        )
        if left > lefts[0]:
            parts.append(
                f'<path d="M{left - 20} 156h12m-5 -5l5 5l-5 5" fill="none" '
                f'stroke="{ACCENT}" stroke-width="2"/>'
            )
        for i, (text, is_loaded) in enumerate(lines):
            y = 92 + i * LINE
            if is_loaded:
                parts.append(
                    f'<rect x="{left + 5}" y="{y - 14}" width="{width - 10}" '
                    f'height="{LINE}" rx="3" fill="{LIGHT}"/>'
                )
            colour = ACCENT if is_loaded else FAINT if text[:1] == " " else INK
            parts.append(
                f'<text x="{left + 12}" y="{y}" fill="{colour}" '
                f'xml:space="preserve">{html.escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    (pathlib.Path(__file__).parent / "pictures" / "parts.svg").write_text(draw())
