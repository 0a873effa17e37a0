"""`nest`: the flat dict that other libraries save, as a tree."""

from collections.abc import Mapping
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
    top: dict[str, Any] = {}
    # The dicts that are made here. Those that are values stay as they are.
    made = {id(top): top}
    for name, value in flat.items():
        if not isinstance(name, str):
            raise TypeError(f"The key {name!r} is not a string of names.")
        *parents, last = name.split(separator)
        node = top
        for count, part in enumerate(parents, 1):
            if part not in node:
                node[part] = new = {}
                made[id(new)] = new
            node = node[part]
            if id(node) not in made:
                raise _both(separator.join(parents[:count]))
        if last in node:
            raise _both(name)
        node[last] = value
    return _plain(top, made)


def _both(name: str) -> ValueError:
    return ValueError(f"`{name}` is a leaf, and a node as well.")


def _plain(node: Any, made: Mapping[int, Any]) -> Any:
    if id(node) not in made:
        return node
    out = {key: _plain(child, made) for key, child in node.items()}
    if out and set(out) == set(map(str, range(len(out)))):
        return [out[str(i)] for i in range(len(out))]
    return out
