"""`rename`: rules that take the names of leaves in a checkpoint to others."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .._kernel._load import _open
from .._kernel._tree import _nearest


class RenameRule(NamedTuple):
    """A rule of a list: what matches the pattern gets the replacement, the adapters, or
    both."""

    pattern: re.Pattern[str]
    replacement: str | None
    adapters: tuple[Callable[..., Any], ...]


@dataclasses.dataclass(frozen=True)
class Rename:
    """A way from names in a checkpoint to those in a model: [`rename`][]."""

    rules: Callable[[str], str] | tuple[RenameRule, ...]
    # Of a function: those for the leaves of these names.
    adapters: Mapping[str, tuple[Callable[..., Any], ...]] = dataclasses.field(
        default_factory=dict
    )

    @property
    def has_adapters(self) -> bool:
        return any(rule.adapters for rule in self.all_rules) or bool(self.adapters)

    @property
    def all_rules(self) -> tuple[RenameRule, ...]:
        """The rules of a list; a function is none."""
        return () if callable(self.rules) else self.rules

    def inverse(self, source: Any) -> "Rename":
        """The way back: from the names in the model to those in the checkpoint.

        **Arguments:**

        - `source`: the checkpoint that the names come from, or its path.

        **Returns:** a rename that knows the names which this one gives to the leaves of
        that checkpoint, and no others.

        **Raises:** `ValueError` where two leaves get one name, and for a rename with
        adapters, which [`inverse`][] turns round for a pair of [`graft`][].

        !!! example

            ```python
            >>> import eqx_ckpt as ec, jax.numpy as jnp
            >>> ec.tree_serialise_leaves("memory://inverse", {"gamma": jnp.ones(2)})
            >>> there = ec.rename([(r"gamma$", "scale")])
            >>> there.inverse("memory://inverse").rules("scale")
            'gamma'

            ```
        """
        if self.has_adapters:
            raise ValueError(
                "The rename has rules with adapters, and its `inverse` is one of names "
                "alone: arrays would stay as the adapters have made them. Give the "
                "rename to `ec.inverse`, and what that returns to a pair of `ec.graft`."
            )
        is_open = isinstance(source, Mapping)
        names = list(source) if is_open else _open.open_path(source).index.leaves.names
        back = inverted(zip(names, renamed_names(self, names)))

        def known(name: str) -> str:
            if name not in back:
                near = _nearest.NameIndex(back).nearest(name)
                hint = f" The nearest that it gives is `{near[0]}`." if near else ""
                raise ValueError(
                    f"`{name}` is none of the names that the rename gives.{hint} "
                    "Leave the leaf out with `filter_spec`."
                )
            return back[name]

        return Rename(known)


def rename(rules: Callable[[str], str] | Sequence[tuple]) -> Rename:
    """From the names of leaves in a checkpoint to those in a tree: for the `rename=` of
    a load, and for a pair of [`graft`][].

    **Arguments:**

    - `rules`: a function from the name of a leaf in the checkpoint to its name in the
        tree: `layer.3.query.weight` to `layers.3.q.weight`. Or a list of rules, which
        are applied one after the other: `(pattern, replacement)`, as `re.sub` takes
        them. In a pair they may also be `(pattern, adapter)` for the leaves that the
        pattern is found in, or `(pattern, replacement, adapter)`. A list of adapters,
        as [`inverse`][] gives it, may be in the place of one. A pattern is looked for
        in the name that the rules before it have made. A rule that changes nothing is
        an error.

    The names that `rename=` is given are whole ones, from the top of the checkpoint on.
    Those in a pair begin below the pair's node.

    **Returns:** what a load takes as `rename=`, and a pair after its two sides.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp
        >>> saved = {"layer": [{"gamma": jnp.ones(2)}]}
        >>> ec.tree_serialise_leaves("memory://rename", saved)
        >>> there = ec.rename([(r"^layer[.]", "layers."), (r"gamma$", "scale")])
        >>> model = {"layers": [{"scale": jnp.zeros(2)}]}
        >>> ec.tree_deserialise_leaves("memory://rename", model, rename=there)
        {'layers': [{'scale': Array([1., 1.], dtype=float32)}]}
        >>> pair = (lambda m: m, lambda c: c, there)
        >>> ec.graft(model, "memory://rename", [pair])[0]
        {'layers': [{'scale': Array([1., 1.], dtype=float32)}]}

        ```
    """
    if callable(rules):
        return Rename(rules)
    if isinstance(rules, (str, bytes)) or not isinstance(rules, Sequence):
        raise TypeError(
            "`rename` takes a function or a list of rules, such as "
            f'`[(r"^layer[.]", "layers.")]`, not a `{type(rules).__name__}`.'
        )
    return Rename(tuple(map(_rule, rules)))


def of(given: Any) -> Rename:
    """The rename that a call was given: a [`rename`][], or what that takes."""
    return given if isinstance(given, Rename) else rename(given)


def _rule(rule: object) -> RenameRule:
    if isinstance(rule, (tuple, list)) and len(rule) in (2, 3):
        pattern, *rest = rule
        replacement = rest.pop(0) if isinstance(rest[0], str) else None
        given = rest.pop(0) if rest else ()
        adapters = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        is_rule = (replacement is not None or adapters) and all(map(callable, adapters))
        if isinstance(pattern, str) and not rest and is_rule:
            try:
                return RenameRule(re.compile(pattern), replacement, adapters)
            except re.error as e:
                raise ValueError(f"The pattern {pattern!r} is no regex: {e}.") from None
    raise TypeError(
        "A rule is `(pattern, replacement)`, `(pattern, adapter)` or "
        f"`(pattern, replacement, adapter)`, and {rule!r} is none of them."
    )


def of_names(given: object) -> Rename:
    """Equal to `of`, for a call that takes arrays as they are.

    **Raises:** `ValueError` for rules with adapters.
    """
    how = of(given)
    if how.has_adapters:
        raise ValueError(
            "`rename` has a rule with an adapter, which changes arrays, and only names "
            "change here: use the rename in a pair of `ec.graft`."
        )
    return how


def check_used(how: Rename, used: set[int], names: Sequence[str], whose: str) -> None:
    """**Raises:** `ValueError` for rules that are not among the `used` ones."""
    if rules := unused(how, used):
        raise ValueError(
            f"`rename` has rules that change no name of the {whose}: "
            f"{', '.join(rules)}. A rule is given whole names, as the rules before it "
            f"have left them: at first, such as `{''.join(names[:1])}`."
        )


def unused(how: Rename, used: set[int]) -> list[str]:
    """The patterns of the rules that are not among the `used` ones."""
    rules = enumerate(how.all_rules)
    return [repr(x.pattern) for number, (x, _, _) in rules if number not in used]


def inverted(names: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The old name of each new one, of pairs of both.

    **Raises:** `ValueError` for two old names that have got one.
    """
    back: dict[str, str] = {}
    for old, new in names:
        if back.setdefault(new, old) != old:
            raise ValueError(
                f"The rename gives the name `{new}` to both `{back[new]}` and `{old}`, "
                "and has no inverse."
            )
    return back


def renamed_names(how: Rename, names: Sequence[str]) -> list[str]:
    """The names that a rename makes of those of leaves. Its adapters are ignored."""
    used: set[int] = set()
    return [apply(how, name, used, "rename").name for name in names]


class NewName(NamedTuple):
    """The new name of a leaf, and the adapters of the rules that made it."""

    name: str
    adapters: tuple[Callable[..., Any], ...]


def apply(how: Rename, name: str, used: set[int], label: str) -> NewName:
    """Renames one leaf. The numbers of rules that did something are added to `used`.
    Errors of a function call it that of `label`."""
    if callable(how.rules):
        try:
            new = how.rules(name)
        except Exception as e:
            raise ValueError(
                f"The rename of `{label}` failed at the name `{name}` with "
                f"{type(e).__name__}: {e}"
            ) from e
        if not isinstance(new, str):
            raise TypeError(
                f"The rename of `{label}` gave a `{type(new).__name__}` for the name "
                f"`{name}`, and must give a name. What is not wanted goes into `drop`."
            )
        return NewName(new, tuple(how.adapters.get(name, ())))
    adapters: list[Callable[..., Any]] = []
    for number, (pattern, replacement, given) in enumerate(how.rules):
        if not pattern.search(name):
            continue
        new = name
        if replacement is not None:
            try:
                new = pattern.sub(replacement, name)
            except (re.error, IndexError) as e:
                raise ValueError(
                    f"The replacement {replacement!r} does not go with the pattern "
                    f"{pattern.pattern!r}: {e}."
                ) from None
        if new != name or given:
            used.add(number)
        adapters += given
        name = new
    return NewName(name, tuple(adapters))
