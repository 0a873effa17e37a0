"""What real libraries make of trees, saved in one process and loaded in another.

    python tests/tree/libraries.py [LIBRARY...] [--install]

Prints a table. The other process sorts sets in another order, and loads into trees that
it makes anew, by several calls. A tree is as it was, or wrong, or its load is refused:
both are failures. `--install` makes an environment in a temporary folder, with all of
the libraries, and runs there.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import NamedTuple


HERE = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.random as jr
import jax.tree_util as jtu
from support import factories
from support.calls import BY_PATH
from support.helpers import facts

import eqx_ckpt as ec


class Outcome(NamedTuple):
    library: str
    name: str
    # "as it was", "refused", "exchanged", "wrong" or "not made".
    what: str
    text: str = ""

    @property
    def is_good(self) -> bool:
        unsteady = self.library in factories.UNSTEADY
        return self.what in ("as it was", *(["refused"] if unsteady else []))


def _save(directory: pathlib.Path, libraries: Sequence[str]) -> list[Outcome]:
    out = []
    for number, (library, name, make) in enumerate(factories.factories(libraries)):
        if isinstance(make, Exception):
            out.append(Outcome(library, name, "not made", repr(make)))
            continue
        try:
            tree = make(jr.key(0))
            ec.tree_serialise_leaves(directory / str(number), tree, durable=False)
        except Exception as e:
            out.append(Outcome(library, name, "not saved", repr(e)))
    return out


def _load(directory: pathlib.Path, libraries: Sequence[str]) -> list[Outcome]:
    out = []
    for number, (library, name, make) in enumerate(factories.factories(libraries)):
        path = directory / str(number)
        if not isinstance(make, Exception) and path.exists():
            what, text = _compared(path, make)
            out.append(Outcome(library, name, what, text))
    return out


def _compared(path: pathlib.Path, make: factories.Factory) -> tuple[str, str]:
    expected, like = jtu.tree_leaves(make(jr.key(0))), make(jr.key(1))
    names = jtu.tree_leaves(ec.leaf_names(like))
    for call, load in BY_PATH.items():
        try:
            loaded = load(path, like)
        except Exception as e:
            return "refused", f"{call}: {type(e).__name__}: {e}"
        if jtu.tree_structure(loaded) != jtu.tree_structure(like):
            return "wrong", f"{call}: the structure"
        for leaf, was, name in zip(jtu.tree_leaves(loaded), expected, names):
            if ec.is_storable(was) and facts(leaf) != facts(was):
                return "wrong", f"{call}: {name}: {facts(leaf)}, and was {facts(was)}"
    return "as it was", ""


def outcomes(directory: pathlib.Path, libraries: Sequence[str]) -> list[Outcome]:
    """Two processes, with other orders of sets: one saves all, one loads all."""
    out = []
    for seed, deed in enumerate(("save", "load")):
        call = [sys.executable, __file__, *libraries, f"--{deed}", str(directory)]
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(call, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        out += [Outcome(*row) for row in json.loads(done.stdout.splitlines()[-1])]
    return out


def table(found: Sequence[Outcome], libraries: Sequence[str]) -> str:
    lines = [f"{'':12}{'version':>14}{'trees':>8}{'as they were':>14}{'refused':>9}  others"]
    for library in libraries:
        mine = [x for x in found if x.library == library]
        kinds = collections.Counter(x.what for x in mine)
        others = [f"{n} {what}" for what, n in kinds.items() if what not in _COLUMNS]
        lines.append(
            f"{library:12}{factories.version(library):>14}{len(mine):>8}"
            f"{kinds['as it was']:>14}{kinds['refused']:>9}  {', '.join(others)}"
        )
    for x in found:
        if not x.what == "as it was":
            first = " ".join(x.text.split())[:300]
            lines.append(f"\n{x.library}, {x.name}: {x.what}: {first}")
    return "\n".join(lines)


_COLUMNS = "as it was", "refused"


def _install(directory: pathlib.Path, rest: Sequence[str]) -> int:
    python = directory / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    # A newer JAX needs haliax as it will be released.
    pip = [str(python), "-m", "pip", "install", "-q", "--pre", str(HERE.parent)]
    wanted = [*dict.fromkeys(factories.packages()), "pytest", "hypothesis"]
    subprocess.run([*pip, *wanted], check=True)
    return subprocess.run([str(python), __file__, *rest]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("libraries", nargs="*", help="by default, all of them")
    parser.add_argument("--install", action="store_true", help="all, in a new place")
    for deed in ("--save", "--load"):
        parser.add_argument(deed, type=pathlib.Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    libraries = given.libraries or list(factories.LIBRARIES)
    if given.save or given.load:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deed = _save if given.save else _load
            print(json.dumps(deed(given.save or given.load, libraries)))
        return
    with tempfile.TemporaryDirectory(prefix="libraries-") as directory:
        place = pathlib.Path(directory)
        if given.install:
            sys.exit(_install(place / "venv", given.libraries))
        found = outcomes(place, libraries)
    print(table(found, libraries))
    sys.exit(not all(x.is_good for x in found))


if __name__ == "__main__":
    main()
