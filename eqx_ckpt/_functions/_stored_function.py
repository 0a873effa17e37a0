"""`Function`: a function stored beside the leaves, that runs without their classes.

Nothing of it is believed. Its bytes have the digest of the index before `jax.export`
sees them. The result has the signature of the index, and calls nothing that
`jax.export` would not have stored.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.export
import jax.numpy as jnp
import jax.tree_util as jtu

from .._kernel._errors import DamagedError
from .._kernel._format import _text
from .._kernel._format._index import StoredFunction
from .._kernel._load import _extra_files, _lazy, _open, _source
from .._kernel._load._lazy import LazyArray
from .._kernel._load._source import Source
from .._kernel._runtime import _arguments, _handlers
from .._kernel._storage._backend import Backend
from .._kernel._tree import _folding, _leaf, _nearest, _sharding
from . import _signature


class Function:
    """A function that is stored in a checkpoint: [`Checkpoint.functions`][] has them.

    It is called with the arguments that it was stored for, arrays in dicts, lists and
    tuples; Modules and States among them are taken as dicts of their arrays by name. It
    reads its weights when it is first called, only those that it uses, and keeps them.
    It can be used in `jax.jit`, and be differentiated if it was stored with a
    `vjp_order`; `jax.vmap` of it is an error of JAX.

    **Attributes:**

    - `name`: its name.
    - `args`, `result`: nests of `jax.ShapeDtypeStruct`s: a tuple of the arguments, and
        what it returns.
    - `leaves`: the names of the leaves that it uses.
    - `names`: the names that it has for them itself: those that they had when it was
        made, before an edit.
    - `platforms`: those that it runs on, such as `("cpu", "cuda")`.
    - `nbytes`: its own bytes, without the leaves.
    - `exported`: the `jax.export.Exported` of `(weights, *args)`, where `weights` is a
        dict of arrays by `names`.
    - `path`: that of the checkpoint.
    - `digest`: of its bytes.

    !!! example

        ```python
        >>> import jax, jax.numpy as jnp, eqx_ckpt as ec
        >>> double = ec.function(lambda t, x: 2 * t["w"] * x, jnp.ones(3))
        >>> tree = {"w": jnp.ones(3), "opt": jnp.zeros(9)}
        >>> ec.tree_serialise_leaves("double", tree, functions={"double": double})
        >>> double = ec.open("double").functions["double"]
        >>> double
        Function(double: (float32[3],) -> float32[3], of 1 leaf)
        >>> double(jnp.arange(3.))
        Array([0., 2., 4.], dtype=float32)

        ```
    """

    def __init__(self, source: Source, name: str):
        stored = source.index.functions[name]
        self._source, self._stored = source, stored
        self.name, self.path = name, source.root.url
        self.names: tuple[str, ...] = tuple(stored.names)
        self.platforms: tuple[str, ...] = tuple(stored.platforms)
        self.digest, self.nbytes = stored.digest, stored.nbytes

    @property
    def leaves(self) -> tuple[str, ...]:
        names = self._source.index.leaves.names
        return tuple(names[leaf_index] for leaf_index in self._stored.leaves)

    @ft.cached_property
    @_handlers.pass_through
    def args(self) -> tuple[Any, ...]:
        return self._structs(self._stored.args)

    @ft.cached_property
    @_handlers.pass_through
    def result(self) -> Any:
        return self._structs(self._stored.result)

    def _structs(self, folded: object) -> Any:
        try:
            return _signature.unfold(folded)
        except Exception as e:
            raise self._bad(f"its signature is of no such arrays ({e})") from e

    @ft.cached_property
    @_handlers.pass_through
    def exported(self) -> jax.export.Exported:
        data = _extra_files.read_function(self._source, self.name)
        try:
            exported = jax.export.deserialize(bytearray(data))
        except ImportError:
            raise ImportError(
                "Functions are read by `jax.export`, which needs flatbuffers. Install "
                "it: `pip install 'eqx_ckpt[functions]'`."
            ) from None
        except Exception as e:
            raise self._unreadable(e) from e
        self._check_exported(exported)
        return exported

    @_arguments.checked()
    def read(
        self,
        *,
        sharding: object = None,
        verify: bool = True,
        max_bytes: int | None = None,
    ) -> dict[str, jax.Array]:
        """Reads the leaves that it uses.

        **Arguments:**

        - `sharding`: None; a `jax.sharding.Sharding` for all of them; or a function
            `(name, jax.ShapeDtypeStruct) -> sharding or None`, as
            [`partition_rules`][] gives.
        - `verify`, `max_bytes`: as in [`tree_deserialise_leaves`][].

        **Returns:** a dict of arrays by `names`: the first argument of `exported.call`.

        **Raises:** as [`LazyArray.read`][].
        """
        lazies = [
            self._lazy(leaf_index, sharding) for leaf_index in self._stored.leaves
        ]
        # Under `jit` these are values, and no part of what is traced.
        with jax.ensure_compile_time_eval():
            values = _lazy.fetch(lazies, verify, max_bytes)
        return dict(zip(self.names, values))

    def _lazy(self, leaf_index: int, sharding: object) -> LazyArray:
        lazy = _lazy.lazy_of(self._source, self._source.index.leaves.record(leaf_index))
        chosen = _sharding.of_leaf(sharding, lazy.name, lazy)
        return lazy if chosen is None else lazy.update(sharding=chosen)

    def __call__(self, *args: Any) -> Any:
        given = self._fitted(args)
        call, weights = self._call, self._weights
        try:
            return call(weights, *given)
        except NotImplementedError as e:
            raise NotImplementedError(
                f"{self._what} is fixed to its shapes, and JAX cannot transform it so "
                f"({e}). Instead of `jax.vmap`, store it with a symbolic dimension, or "
                "use `jax.lax.map`."
            ) from e
        except ValueError as e:
            e.add_note(f"{self._what} takes {self._takes}.")
            raise

    def _fitted(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments as arrays of the signature: of its dtypes, ranks and fixed
        dimensions. JAX solves for symbolic ones.

        **Raises:** `TypeError` for others than it takes.
        """
        nest = _signature.nest(args, "The argument")

        def refused(where: str = "") -> TypeError:
            given = f"{_short(nest)}{where}"
            return TypeError(
                f"{self._what} takes {self._takes}, and was given {given}."
            )

        structs, structure = jtu.tree_flatten(self.args)
        given, own = jtu.tree_flatten(nest)
        if own != structure:
            raise refused()
        out = [_converted(x, struct.dtype) for x, struct in zip(given, structs)]
        for x, struct in zip(out, structs):
            if not _fits(x, struct):
                if _needs_x64(struct.dtype):
                    raise TypeError(
                        f"{self._what} takes {_short(struct)}, and is given "
                        f"{_short(x)}. Enable x64 (`jax_enable_x64`), as it was when "
                        "it was stored."
                    )
                raise refused(f": there is {_short(x)} for {_short(struct)}")
        return jtu.tree_unflatten(structure, out)

    @ft.cached_property
    def _weights(self) -> dict[str, jax.Array]:
        return self.read()

    @ft.cached_property
    def _call(self) -> Callable[..., Any]:
        return jax.jit(self.exported.call)

    # ---- What is not believed.

    def _check_exported(self, exported: jax.export.Exported) -> None:
        """**Raises:** `DamagedError` for what is another function than the index says,
        or does what no function does that `jax.export` stores."""
        weights = dict(zip(self.names, map(self._abstract, self._stored.leaves)))
        try:
            args, result = self.args, self.result
            jtu.tree_unflatten(exported.in_tree, exported.in_avals)
            jtu.tree_unflatten(exported.out_tree, exported.out_avals)
        except ValueError as e:
            raise self._bad(str(e)) from e
        wanted = jtu.tree_flatten(((weights, *args), {}))
        trees = wanted[1], jtu.tree_structure(result)
        pairs = [
            *zip(exported.in_avals, wanted[0]),
            *zip(exported.out_avals, jtu.tree_leaves(result)),
        ]
        if (exported.in_tree, exported.out_tree) != trees or any(
            _signature.fold(a) != _signature.fold(b) for a, b in pairs
        ):
            raise self._bad("it has another signature than the index says")
        if list(exported.platforms) != self._stored.platforms:
            raise self._bad("it is for other platforms than the index says")
        if exported.ordered_effects or exported.unordered_effects:
            raise self._bad("it has effects")
        if exported.disabled_safety_checks:
            raise self._bad("checks of `jax.export` are disabled in it")
        why = _refused(exported, self._stored.order)
        if why is not None and exported.nr_devices > 1:
            raise ValueError(
                f"{self._what} is stored for {exported.nr_devices} devices. Call it "
                "within `jax.set_mesh` of a mesh of so many, or save it outside of "
                f"`jax.set_mesh`, and it runs anywhere ({_text.escape(why)}). The "
                "leaves are not affected."
            )
        if why is not None:
            raise self._bad(why)

    def _abstract(self, leaf_index: int) -> jax.ShapeDtypeStruct:
        record = self._source.index.leaves.record(leaf_index)
        name, template = record.name, record.whole
        if template.kind not in ("jax", "key"):
            raise self._bad(f"the leaf `{name}` that it uses is no array")
        abstract = _leaf.abstract(template)
        if _needs_x64(abstract.dtype):
            raise TypeError(
                f"{self._what} uses the leaf `{name}`, which is {abstract.dtype}. "
                "Enable x64 (`jax_enable_x64`), as it was when it was stored."
            )
        return abstract

    @property
    def _what(self) -> str:
        return f"The function `{_text.escape(self.name)}`"

    def _bad(self, why: str) -> DamagedError:
        name, path = _text.escape(self.name), self._source.root
        return DamagedError(
            f"The function `{name}` of the checkpoint at `{path}` cannot be run: "
            f"{_text.bounded(why)}. The leaves are not affected."
        )

    def _unreadable(self, error: Exception) -> ValueError:
        # Its digest is right: it is what was written.
        name, path = _text.escape(self.name), self._source.root
        by = _text.bounded(self._stored.versions.get("jax", "?"), 20)
        why = _text.bounded(f"{type(error).__name__}: {error}")
        return ValueError(
            f"The function `{name}` of the checkpoint at `{path}` cannot be read by "
            f"JAX {jax.__version__}, as JAX {by} has written it ({why}). JAX reads "
            "functions of releases up to 6 months older than itself. Run it with such "
            "a release, or load the tree with its class, and save it again. The leaves "
            "are not affected."
        )

    # ---- As a value.

    def __repr__(self) -> str:
        count = len(self._stored.leaves)
        return (
            f"Function({_text.escape(self.name)}: {self._takes} "
            f"-> {_signature.short(self._stored.result)}, of {count} "
            f"{'leaf' if count == 1 else 'leaves'})"
        )

    @property
    def _takes(self) -> str:
        return _signature.short(self._stored.args)

    def __reduce__(self) -> Any:
        _source.check_pickles(self._source)
        return _unpickle, (self._source.root, self._source.index.save, self.name)


def _needs_x64(dtype: object) -> bool:
    return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype


class Functions(dict[str, Function]):
    """The functions of a checkpoint by name. Each is made once."""

    def __init__(self, source: Source):
        names = source.index.functions
        super().__init__({name: Function(source, name) for name in names})

    def __missing__(self, name: object) -> NoReturn:
        near = _nearest.NameIndex(self).nearest(str(name), 3)
        some = _folding.some(near or list(self)) or "none"
        raise KeyError(f"The checkpoint has no function {name!r}. It has {some}.")

    def __repr__(self) -> str:
        return "\n".join(
            ["Functions", *(f"  {function!r}" for function in self.values())]
        )


# What others ask in the place of a `Function`, which is public.


def source_of(function: Function) -> Source:
    """The checkpoint that a function is in."""
    return function._source


def stored_of(function: Function) -> StoredFunction:
    """The entry of a function in the index."""
    return function._stored


def _unpickle(root: Backend, save: str, name: str) -> Function:
    return Function(_open.reopen(root, save), name)


def _fits(x: jax.Array, struct: jax.ShapeDtypeStruct) -> bool:
    """Whether an array has the dtype, the rank and the fixed dimensions of a struct."""
    if x.dtype != struct.dtype or len(x.shape) != len(struct.shape):
        return False
    dimensions = zip(struct.shape, x.shape)
    return all(jax.export.is_symbolic_dim(m) or m == n for m, n in dimensions)


def _refused(exported: jax.export.Exported, order: int) -> str | None:
    """Why a function, or a derivative of it, is not run; None if it is.

    They are exported once more: `jax.export` checks all that they call when it stores
    them, and not when it reads them.
    """
    for number in range(order + 1):
        try:
            args, kwargs = jtu.tree_unflatten(
                exported.in_tree, list(map(_signature.struct, exported.in_avals))
            )
            call = jax.jit(exported.call)
            jax.export.export(call, platforms=exported.platforms)(*args, **kwargs)
            if number < order:
                if not exported.has_vjp():
                    return "it has no derivative, against what the index says"
                exported = exported.vjp()
        except Exception as e:
            return f"`jax.export` refuses it ({e})"
    return "it has more derivatives than it says" if exported.has_vjp() else None


def _converted(x: Any, dtype: Any) -> Any:
    """An argument as a jax.Array; a number has the dtype that is asked for."""
    if isinstance(x, (bool, int, float, complex)):
        same = jnp.result_type(x, dtype) == dtype
        return jnp.asarray(x, dtype if same else None)
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _short(nest: object) -> str:
    return _signature.short(_signature.fold(nest))
