"""`nest`: the flat dict that other libraries save, as a tree."""

from collections.abc import Iterable, Mapping
from typing import Any


def nest(flat: Mapping[str, Any], separator: str = ".") -> Any:
    """Makes nested dicts and lists of a dict with joined keys, as a `state_dict` is.

    A checkpoint of the result has nodes, such as `c.encoder.layer[3]`, which a `where`,
    a `source` and [`graft`][] can pick.

    **Arguments:**

    - `flat`: a dict from joined keys to values.
    - `separator`: what the keys are joined with.

    **Returns:** nested dicts. A dict whose keys are 0, 1, 2, ... becomes a list.

    **Raises:** `ValueError` if a key is that of a leaf, and the start of another key;
    `TypeError` for a key that is not a string.

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.nest({"layer.0.weight": 1, "layer.1.weight": 2, "bias": 3})
        {'layer': [{'weight': 1}, {'weight': 2}], 'bias': 3}

        ```
    """
    rows = []
    for name, value in flat.items():
        if not isinstance(name, str):
            raise TypeError(f"The key {name!r} is not a string of names.")
        parts = name.split(separator)
        for count in range(1, len(parts)):
            above = separator.join(parts[:count])
            if above in flat:
                raise ValueError(f"`{above}` is a leaf, and a node as well.")
        rows.append((parts, value))
    return _node(rows)


def _node(rows: Iterable[tuple[list[str], Any]]) -> Any:
    """The node of leaves whose names below it are split into these parts."""
    groups: dict[str, list[tuple[list[str], Any]]] = {}
    for (first, *rest), value in rows:
        groups.setdefault(first, []).append((rest, value))
    out = {}
    for key, group in groups.items():
        rest, value = group[0]
        out[key] = _node(group) if rest else value
    if out and set(out) == set(map(str, range(len(out)))):
        return [out[str(i)] for i in range(len(out))]
    return out
