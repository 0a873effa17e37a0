"""Does to each checkpoint all that a user does, in a process that is closely watched.

It reads a path from each line of its input, and writes a line of JSON: what came of
every step, and the seconds of processor time that it took, which are to be no more than
its argument says. Memory is limited to what is there after a good checkpoint has been
loaded, and 200 MB.
"""

import contextlib
import io
import json
import os
import pathlib
import re
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import xxhash
from support import command
from support.clock import timed

import attacks
import eqx_ckpt as ec

from . import everything, KINDS, skeleton, tree
from ._structure import PWNED


MEMORY = 200 * 2**20


def viewed(leaf: Any) -> bool:
    # Not by its name, which may be what was changed.
    return leaf.shape != () and leaf._target.kind not in ("key", "str", "bytes")


def documented(error: Exception) -> str:
    """The type of an error as the docs have it: ours, or that of Python."""
    if isinstance(error, ec.DamagedError):
        return "DamagedError"
    types = type(error).__mro__
    return next(cls.__name__ for cls in types if cls.__module__ == "builtins")


def steps(path: str, like: Any, of: Any = None) -> dict[str, Any]:
    """`None` for each step that went well, or the type and the text of its error. `of`
    is the tree of a format that has no names. `value`: the digest of what was read."""
    out: dict[str, Any] = {}

    def step(name: str, do: Any) -> Any:
        out[name] = None
        try:
            return do()
        except Exception as e:
            out[name] = [documented(e), str(e)]

    def ls() -> str:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            command.main(["ls", path])
        assert all(line.isprintable() for line in text.getvalue().split("\n"))
        return text.getvalue()

    step("ls", ls)
    ckpt = step("open", lambda: ec.open(path, like=of))
    if ckpt is None:
        return out
    step("touch", lambda: [repr(leaf) for leaf in ckpt.leaves.values()])
    step("show", lambda: (repr(ckpt), repr(ckpt.leaves)))
    whole = step("tree", lambda: jtu.tree_map(lambda x: x, ckpt.tree))
    out["value"] = step("read", lambda: _digest(ec.materialise(whole)))
    step("html", lambda: (ckpt._repr_html_(), ckpt.tree))
    step("unverified", lambda: ec.materialise(whole, verify=False))
    some = lambda: [x for x in jtu.tree_leaves(whole) if viewed(x)][:50]
    step("views", lambda: [x[:1].read() for x in some()])
    step("functions", lambda: [f.exported for f in ckpt.functions.values()])
    step("store", lambda: [leaf.store for leaf in list(ckpt.leaves.values())[:50]])
    step("verify", lambda: out.update(problems=list(map(str, ec.verify(path)))))
    loaded = step("load", lambda: ec.tree_deserialise_leaves(ckpt, like, everything))
    rebuilt = step("rebuild", lambda: ec.rebuild(ckpt, [attacks]))
    if rebuilt is not None and loaded is not None:
        assert same(rebuilt, loaded)
    assert not PWNED
    out["right"] = loaded is not None and same(loaded, tree())
    return out


def _digest(tree: Any) -> str:
    rows, structure = jtu.tree_flatten(tree)
    leaves = [jr.key_data(x) if _is_key(x) else x for x in rows]
    shown = [(type(x).__name__, getattr(x, "shape", x)) for x in leaves]
    arrays = [np.asarray(x) for x in leaves if hasattr(x, "shape")]
    data = repr((structure, shown)).encode() + b"".join(x.tobytes() for x in arrays)
    return xxhash.xxh3_128_hexdigest(data)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def same(a: Any, b: Any) -> bool:
    leaves, other = jtu.tree_leaves(a), jtu.tree_leaves(b)
    return all(repr(x) == repr(y) for x, y in zip(leaves, other, strict=True))


def _data_size() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"VmData:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def limit_memory(more: int = MEMORY) -> None:
    """Limits what is taken from here on. More can be given later on."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_data_size() + more, hard))


def main(most: float) -> None:
    like = skeleton()
    lines = (line.strip() for line in sys.stdin)
    # The first ones are good: they load what is loaded once.
    for _ in KINDS:
        good = steps(next(lines), like)
        assert good.pop("right") and good.pop("value") and not any(good.values()), good
    limit_memory()
    print(json.dumps("ready"), flush=True)
    for path in lines:
        with contextlib.suppress(OSError):
            os.open(f"/attack/{path}", os.O_RDONLY)  # Marks the place in a trace.
        out, out["seconds"] = timed(most, lambda path=path: steps(path, like))
        print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
