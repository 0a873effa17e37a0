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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple


HERE = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(HERE))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.random as jr
import jax.tree_util as jtu
from support import factories
from support.calls import BY_PATH
from support.helpers import facts

import eqx_ckpt as ec


class Outcome(NamedTuple):
    library: str
    name: str
    # "as it was", "may be refused", "refused", "exchanged", or an "error" of another
    # kind.
    what: str
    text: str = ""

    @property
    def is_good(self) -> bool:
        return self.what in ("as it was", "may be refused")


def _with_numbers(make: factories.Factory, seed: int) -> Any:
    """A tree, beside an array: some trees have nothing that is stored."""
    return {"tree": make(jr.key(seed)), "beside": jr.normal(jr.key(seed))}


def _save(path: pathlib.Path, new: Outcome, make: Any, calls: Sequence[str]) -> Outcome:
    ec.tree_serialise_leaves(path, _with_numbers(make, 0), durable=False)
    return new


def _load(path: pathlib.Path, new: Outcome, make: Any, calls: Sequence[str]) -> Outcome:
    expected = jtu.tree_leaves(_with_numbers(make, 0))
    like = _with_numbers(make, 1)
    for call in calls:
        try:
            loaded, _ = jtu.tree_flatten_with_path(BY_PATH[call](path, like))
        except RuntimeError as e:
            if call not in factories.MAY_REFUSE.get(new.library, ()):
                return new._replace(what="refused", text=f"{call}: {e}")
            new = new._replace(what="may be refused", text=f"{call}: {e}")
            continue
        for (keys, leaf), was in zip(loaded, expected, strict=True):
            if ec.is_storable(was) and facts(leaf) != facts(was):
                name = jtu.keystr(keys)
                return new._replace(what="exchanged", text=f"{call}: at {name}")
    return new


def _each(
    deed: Callable[..., Outcome],
    directory: pathlib.Path,
    libraries: Sequence[str],
    calls: int,
) -> Iterator[Outcome]:
    for number, (library, name, make) in enumerate(factories.factories(libraries)):
        new = Outcome(library, name, "as it was")
        turn = [[*BY_PATH][(number + i) % len(BY_PATH)] for i in range(calls)]
        try:
            if isinstance(make, Exception):
                raise make
            yield deed(directory / str(number), new, make, turn)
        except Exception as e:
            yield new._replace(what="error", text=f"{type(e).__name__}: {e}")


def outcomes(
    directory: pathlib.Path, libraries: Sequence[str], calls: int = len(BY_PATH)
) -> list[Outcome]:
    """Two processes, with other orders of sets: one saves all, one loads all by so many
    of the calls, in turns."""
    out: dict[tuple[str, str], Outcome] = {}
    for seed, deed in enumerate(("save", "load")):
        call = [sys.executable, __file__, *libraries, f"--{deed}", str(directory)]
        # Both compile the same programs.
        compiled = {
            "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        env = {**os.environ, **compiled, "PYTHONHASHSEED": str(seed)}
        call += ["--calls", str(calls)]
        done = subprocess.run(call, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        for row in json.loads(done.stdout.splitlines()[-1]):
            new = Outcome(*row)
            if out.get(new[:2], new).what != "error":  # What was not saved stays so.
                out[new[:2]] = new
    return [*out.values()]


_WHATS = "as it was", "may be refused", "refused", "exchanged", "error"


def table(found: Sequence[Outcome], libraries: Sequence[str]) -> str:
    lines = [f"{'':26}{'trees':>6}" + "".join(f"{what:>16}" for what in _WHATS)]
    for library in libraries:
        mine = [x for x in found if x.library == library]
        kinds = collections.Counter(x.what for x in mine)
        head = f"{library:12}{factories.version(library):>14}{len(mine):>6}"
        lines.append(head + "".join(f"{kinds[what]:>16}" for what in _WHATS))
    for x in found:
        if x.what != "as it was":
            text = " ".join(x.text.split())[:300]
            lines.append(f"\n{x.library}, {x.name}: {x.what}: {text}")
    return "\n".join(lines)


def _install(directory: pathlib.Path, rest: Sequence[str]) -> int:
    python = directory / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "-q", str(HERE.parent)]
    wanted = [*factories.packages(), "attrs", "hypothesis", "pytest"]
    subprocess.run([*pip, *wanted], check=True)
    return subprocess.run([str(python), __file__, *rest]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("libraries", nargs="*", help="by default, all of them")
    parser.add_argument("--install", action="store_true", help="all, in a new place")
    for deed in ("--save", "--load"):
        parser.add_argument(deed, type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=len(BY_PATH), help="of each tree")
    given = parser.parse_args()
    libraries = given.libraries or list(factories.LIBRARIES)
    if given.save or given.load:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            deed, place = (_save, given.save) if given.save else (_load, given.load)
            print(json.dumps([*_each(deed, place, libraries, given.calls)]))
        return
    with tempfile.TemporaryDirectory(prefix="libraries-") as directory:
        place = pathlib.Path(directory)
        if given.install:
            sys.exit(_install(place / "venv", given.libraries))
        found = outcomes(place, libraries, given.calls)
    print(table(found, libraries))
    sys.exit(not all(x.is_good for x in found))


if __name__ == "__main__":
    main()
