"""Draws docs/pictures/parts.svg, and parts-narrow.svg for telephones.

`python docs/_pictures.py` does it.

What it shows is what the program of the README does: its tree is saved here, and the
same part of it is loaded.
"""

import html
import pathlib
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

import eqx_ckpt as ec


HEIGHT, LINE = 250, 19
WIDE = [(16, 206), (246, 228), (498, 226), (748, 216)]  # Left, and width.
NARROW = [(16, 230), (270, 204)]
STYLE = """\
text{font:12.5px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#24292f}
.title{font:600 16px system-ui,sans-serif}.code{font-size:11px}
.faint{fill:#6e7781}.accent{fill:#00796b}.light{fill:#d9efec}.page{fill:#fff}
.box{fill:#f6f8fa;stroke:#d0d7de}.arrow{fill:none;stroke:#00796b;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.faint{fill:#9198a1}.accent{fill:#4fd1bd}
.light{fill:#12443e}.page{fill:#14171c}.box{fill:#1d2127;stroke:#3d444d}.arrow{stroke:#4fd1bd}}"""


class Net(eqx.Module):
    scale: jax.Array
    shift: jax.Array
    mlp: eqx.nn.MLP


def net(key: jax.Array) -> Net:
    mlp = eqx.nn.MLP(256, 256, 256, depth=1, key=key)
    return Net(scale=jnp.ones(2), shift=jnp.zeros(2), mlp=mlp)


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
                ckpt, like, source="model", where=lambda m: m.mlp.layers[1]
            )
        unread = set(ec.unloaded(part))
        read, whole = _size(bytes_read()), _size(ckpt.nbytes)
    is_read = {name: name.removeprefix("model.") not in unread for name in names}
    is_read["step"] = False
    (data,) = (name for name in sizes if name.endswith("/0"))
    save = data.split("/")[1]
    tree = ["Net(", "  scale, shift,", "  mlp=MLP(layers=("]
    tree += ["    Linear(weight, bias),", "    Linear(weight, bias)", "  ))", ")"]
    said = {
        "eqx_ckpt.json": "names, shapes: the index",
        data: f"all arrays: {_size(sizes[data])}",
        f"d/{save}/digests": "checked as they are read",
    }
    listing = []
    for name in sizes:
        listing.append((name.replace(save, "<save>"), name == data))
        listing += [(f"  {said[name]}", False)] if name in said else []
    loaded = []
    for node in ("scale", "shift", "mlp.layers.0", "mlp.layers.1"):
        is_here = not any(name.startswith(node) for name in unread)
        loaded.append((f"{node:13} {'arrays' if is_here else 'shapes'}", is_here))
    loaded += [("", False), (f"{read} of {whole}", False), ("were read", False)]
    return [
        (
            "A tree",
            '{"model": model, "step": 7}',
            [(line, i == 4) for i, line in enumerate(tree)],
        ),
        ("Names", "tree_serialise_leaves", list(is_read.items())),
        ("Files", "what lies at the path", listing),
        ("One part of it", "where=lambda m: m.mlp.layers[1]", loaded),
    ]


def draw(narrow: bool = False) -> str:
    """The picture, as SVG: in one row, or in two."""
    width, height = (490, 2 * HEIGHT) if narrow else (980, HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="A tree, the names '
        'of its leaves, the files that hold them, and one part of it loaded">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>',
    ]
    for number, (title, code, lines) in enumerate(_columns()):
        column = number % 2 if narrow else number
        (left, width), top = (NARROW if narrow else WIDE)[column], 0
        if narrow and number > 1:
            top = HEIGHT
        parts.append(
            f'<rect class="box" x="{left}" y="{top + 66}" width="{width}" '
            f'height="{HEIGHT - 82}" rx="6"/>'
            f'<text class="title" x="{left}" y="{top + 32}">{title}</text>'
            f'<text class="code faint" x="{left}" y="{top + 54}">'
            f"{html.escape(code)}</text>"
        )
        if column:
            parts.append(
                f'<path class="arrow" d="M{left - 20} {top + 156}h12m-5 -5l5 5l-5 5"/>'
            )
        for i, (text, is_loaded) in enumerate(lines):
            y = top + 92 + i * LINE
            if is_loaded:
                parts.append(
                    f'<rect class="light" x="{left + 5}" y="{y - 14}" '
                    f'width="{width - 10}" height="{LINE}" rx="3"/>'
                )
            kind = "accent" if is_loaded else "faint" if text[:1] == " " else ""
            parts.append(
                f'<text class="{kind}" x="{left + 12}" y="{y}" '
                f'xml:space="preserve">{html.escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


PICTURES = {"parts.svg": False, "parts-narrow.svg": True}


if __name__ == "__main__":
    for name, narrow in PICTURES.items():
        path = pathlib.Path(__file__).parent / "pictures" / name
        path.write_text(draw(narrow))
