"""Merges beside those of mergekit: the same tensors through both.

    python -m pip install mergekit torch && python benchmarks/against_mergekit.py

For each method and dtype: how many elements are equal to the bit, and in brackets the
largest difference, in steps of the dtype at the largest magnitude. mergekit's own task
classes compute on the CPU, in the dtype of the tensors; in the last two columns in
float32, as its `dtype: float32` with another `out_dtype` asks for. Methods that draw at
random are compared by the share of elements that stay those of the base, and by the
mean of changes. Those of docs/editing.md are taken from there.
"""

import argparse
import os
import pathlib
import re
from importlib.metadata import version
from typing import Any, NamedTuple


os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.random as jr
import ml_dtypes
import numpy as np
import torch
from mergekit.merge_methods import registry
from mergekit.merge_methods.api import merge_tensors

import eqx_ckpt as ec
from eqx_ckpt import merging


KEY = jr.key(0)
# The dtype of the tensors, and what mergekit computes in.
DTYPES = {
    "float32": (np.float32, torch.float32, None),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16, None),
    "float16": (np.float16, torch.float16, None),
    "bfloat16 in float32": (ml_dtypes.bfloat16, torch.bfloat16, torch.float32),
    "float16 in float32": (np.float16, torch.float16, torch.float32),
}


def _recipes() -> dict[str, Any]:
    """The methods that docs/editing.md writes."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "editing.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (block,) = (x for x in blocks if "def nearswap" in x)
    names: dict[str, Any] = {"ec": ec}
    exec(block[: block.index("\nmodels = ")], names)
    return names


class Case(NamedTuple):
    """A method of ours, and what mergekit's is given; `why` they differ, if they do."""

    name: str
    method: merging.Method
    theirs: str
    options: dict[str, Any]
    count: int = 3
    why: str = ""
    # Whether mergekit's slerp and nearswap call the first of the two their base.
    first_is_base: bool = False
    is_random: bool = False


W = [0.7, 0.2, 0.4]
_HALF = "half precision: mergekit rounds each step"
_TIED = "equal magnitudes share one fate here"
_SCALED = "`rescale`: by the chance here, by sums of magnitudes there"
RECIPES = _recipes()


def _task(**options: Any) -> dict[str, Any]:
    """mergekit's options. Floats, but for `lambda`, it has one of for each tree."""
    is_each = lambda key, x: isinstance(x, float) and key != "lambda"
    each = {key: [x] * 3 for key, x in options.items() if is_each(key, x)}
    return {"weight": W, **options, **each}


CASES = [
    Case("average", merging.average(), "linear", {"weight": [1.0] * 3}),
    Case(
        "average, weighted",
        merging.average(W),
        "linear",
        {"weight": W},
        why="one rounding more here: torch multiplies and adds at once",
    ),
    Case(
        "slerp",
        merging.slerp(0.3),
        "slerp",
        {"t": 0.3},
        2,
        "the angle is summed in float64 here",
        first_is_base=True,
    ),
    Case(
        "model_stock",
        merging.model_stock(),
        "model_stock",
        {},
        why=f"cosines are summed in float64 here; {_HALF}",
    ),
    Case(
        "task_arithmetic",
        merging.task_arithmetic(W, lambda_=0.8),
        "task_arithmetic",
        _task(**{"lambda": 0.8}),
        why=_HALF,
    ),
    Case(
        'task_arithmetic, normalize="weights"',
        merging.task_arithmetic(W, normalize="weights"),
        "task_arithmetic",
        _task(normalize=True),
        why=_HALF,
    ),
    Case(
        'ties, normalize="weights"',
        merging.ties(W, 0.3, normalize="weights"),
        "ties",
        _task(density=0.3),
        why=f"{_TIED}; {_HALF}, which elects other signs",
    ),
    Case(
        'ties, normalize="count"',
        merging.ties(W, 0.3),
        "ties",
        _task(density=0.3),
        why="another divisor: the count, which is the paper's",
    ),
    Case(
        "breadcrumbs, density 0.625",
        merging.breadcrumbs(W, 0.625, 0.03125),
        "breadcrumbs",
        _task(density=0.625, gamma=0.03125),
        why=f"{_TIED}; {_HALF}",
    ),
    Case(
        "breadcrumbs, density 0.6",
        merging.breadcrumbs(W, 0.6, 0.02),
        "breadcrumbs",
        _task(density=0.6, gamma=0.02),
        why=f"the count of what stays is rounded here, cut there; {_TIED}; {_HALF}",
    ),
    Case(
        "dare, density 1",
        merging.dare(W, 1, KEY),
        "dare_linear",
        _task(density=1.0),
        why=_HALF,
    ),
    Case(
        "dare_ties, density 1",
        merging.dare_ties(W, 1, KEY, normalize=None),
        "dare_ties",
        _task(density=1.0),
        why=f"{_HALF}, which elects other signs; a sum of 0 has no sign here",
    ),
    Case(
        "nearswap (docs/editing.md)",
        RECIPES["nearswap"](0.01),
        "nearswap",
        {"t": 0.01},
        1,
        f"torch multiplies by 1 / distance; {_HALF}",
    ),
    Case(
        "karcher (docs/editing.md)",
        RECIPES["karcher"](),
        "karcher",
        {},
        why=f"products are summed in float64 here; {_HALF}",
    ),
    Case(
        "dare, 0.4",
        merging.dare(W, 0.4, KEY),
        "dare_linear",
        _task(density=0.4),
        why=_SCALED,
        is_random=True,
    ),
    Case(
        "dare, 0.4, no rescale",
        merging.dare(W, 0.4, KEY, rescale=False),
        "dare_linear",
        _task(density=0.4, rescale=False),
        is_random=True,
    ),
    Case(
        "dare_ties, 0.4",
        merging.dare_ties(W, 0.4, KEY, normalize=None),
        "dare_ties",
        _task(density=0.4),
        why=_SCALED,
        is_random=True,
    ),
    Case(
        'della, 0.4, normalize="weights"',
        merging.della(W, 0.4, 0.2, KEY, normalize="weights"),
        "della",
        _task(density=0.4, epsilon=0.1),
        why=f"`epsilon` is twice mergekit's; {_SCALED}: larger ones stay likelier",
        is_random=True,
    ),
]


def _tensors(count: int, dtype: Any, scale: float) -> list[np.ndarray]:
    """A base, and trees near it."""
    rng = np.random.default_rng(0)
    base = 0.05 * rng.standard_normal((512, 384))
    trees = [base + scale * rng.standard_normal(base.shape) for _ in range(count)]
    return [x.astype(dtype) for x in (base, *trees)]


def _cell(case: Case, name: str) -> str:
    dtype, theirs, inside = DTYPES[name]
    # Only trees that are far from each other have an angle.
    base, *trees = _tensors(case.count, dtype, 0.05 if case.theirs == "slerp" else 0.01)
    has_base = case.method.base
    merged = ec.merge(
        [{"w": x} for x in trees], case.method, base={"w": base} if has_base else None
    )
    sides = [base, *trees] if has_base else trees
    # The ids of trees: a base, if there is one, is the first.
    options = {
        key: {i + has_base: x for i, x in enumerate(value)}
        if isinstance(value, list)
        else value
        for key, value in case.options.items()
    }
    other = merge_tensors(
        [torch.from_numpy(x.astype(np.float32)).to(theirs) for x in sides],
        case.theirs,
        parameters=options,
        base_index=0 if has_base or case.first_is_base else None,
        dtype=inside,
        out_dtype=theirs,
    )
    a = merged["w"].read().astype(np.float64)
    b = other.to(torch.float64).numpy()
    if case.is_random:
        start = base.astype(np.float64)
        shares = [f"{np.mean(x == start):.1%}" for x in (a, b)]
        sizes = [f"{np.mean(np.abs(x - start)):.2e}" for x in (a, b)]
        return f"{' / '.join(shares)}, {' / '.join(sizes)}"
    step = float(ml_dtypes.finfo(dtype).eps) * np.abs(b).max()
    return f"{np.mean(a == b):.3%} ({np.abs(a - b).max() / step:.2g})"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    torch.manual_seed(0)
    print(f"mergekit {version('mergekit')}, torch {torch.__version__}\n")
    print(f"| | {' | '.join(DTYPES)} | why they differ |")
    print(f"| --- |{' ---: |' * len(DTYPES)} --- |")
    for case in CASES:
        cells = [_cell(case, name) for name in DTYPES]
        print(f"| {' | '.join([case.name, *cells, case.why])} |", flush=True)
    ours = {case.theirs for case in CASES}
    names = [x.spec.name for x in registry.registered_methods()]
    print("\nOnly of mergekit:", ", ".join(x for x in names if x not in ours))


if __name__ == "__main__":
    main()
