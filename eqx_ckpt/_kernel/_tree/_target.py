"""Targets: what `like` asks for at a leaf, and whether a stored leaf fits."""

import functools as ft
from typing import Any, NamedTuple

import jax
import jax.core as jax_core
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from .._format import _template
from .._format._template import Template
from .._runtime import _processes
from . import _folding, _leaf, _register, _sharding


class Target(NamedTuple):
    """The leaf that a stored one comes back as, by what `like` says.

    `weak`: JAX's weak type. `impl`: of keys, their PRNG. `python`: the class of a
    scalar. `cast`: whether numbers may change. `registered`: the type that the caller
    has registered for the leaf."""

    kind: str
    dtype: np.dtype | None
    shape: tuple[int, ...]
    weak: bool = False
    impl: str | None = None
    sharding: jax.sharding.Sharding | None = None
    python: type | None = None
    cast: bool = False
    registered: _register.Codec | None = None


class Unread(jax.ShapeDtypeStruct):
    """An abstract leaf of which a store has the value. As a leaf of `like` it stands
    for what it would be read as."""

    __slots__ = ()

    @property
    def _target(self) -> Target:
        raise NotImplementedError


def target_of(like: PyTree) -> Target:
    """**Raises:** `TypeError` for a leaf that no stored leaf can stand for, and
    `ValueError` when the `to_leaf` of its type fails."""
    # Nearly all leaves are these.
    is_unread = isinstance(like, Unread)
    is_abstract = is_unread or type(like) is jax.ShapeDtypeStruct
    if is_abstract and like.sharding is None and _processes.count() == 1:
        if not is_unread or like._target.kind == "jax":
            return _jax_target(like.dtype, like.shape, like.weak_type, None)
    codec = _register.codec_of(type(like))
    if codec is not None:
        return _target_of(_register.to_leaf(like))._replace(registered=codec)
    return _target_of(like)


def _target_of(like: PyTree) -> Target:
    if isinstance(like, Unread) and like._target.kind not in ("jax", "key"):
        # That it is cast as it is read says nothing of what is loaded in its place.
        return like._target._replace(cast=False)
    if isinstance(like, jax.Array) or isinstance(like, jax.ShapeDtypeStruct):
        if isinstance(like, jax_core.Tracer):
            raise TypeError(
                "`like` has a tracer there, which does not say where the leaf goes. "
                "Load outside of `jit`, `grad` and `vmap`, or into a skeleton."
            )
        sharding = None
        if isinstance(like, jax.Array):
            if like.committed:
                sharding = like.sharding
        else:
            sharding = _placed(like.sharding, like.shape)
            if sharding is None and _processes.count() > 1:
                raise TypeError(
                    "It has no sharding. In a run of many processes every abstract "
                    "leaf needs one, such as `ec.skeleton(..., sharding=)` gives it."
                )
        if sharding is not None:
            if axes := _sharding.unreduced(sharding):
                raise TypeError(
                    f"Its sharding is not reduced over the mesh axes {axes}: give it "
                    "one that is, as what is stored is whole."
                )
            _sharding.check_here(sharding)
        weak = getattr(like, "weak_type", False)  # Keys lack it.
        return _jax_target(like.dtype, like.shape, weak, sharding)
    if isinstance(like, np.ndarray):
        _leaf.check_plain(like)
        return Target("numpy", like.dtype, like.shape)
    if isinstance(like, np.generic) and not isinstance(like, (np.str_, np.bytes_)):
        return Target("generic", like.dtype, like.shape)
    for kind, cls in _leaf.PLAIN.items():
        if isinstance(like, cls):
            return Target(kind, None, (), python=type(like))
    raise TypeError(
        f"`like` has a `{type(like).__name__}` there, which nothing that is stored can "
        "stand for. Leave it out with `filter_spec`, or make its type one that can be "
        f"stored{_leaf.recipe(like)}."
    )


@ft.lru_cache(maxsize=4096)
def _jax_target(
    dtype: Any, shape: tuple[int, ...], weak: bool, sharding: Any
) -> Target:
    if _leaf.is_key_dtype(dtype):
        return Target("key", None, shape, impl=impl_of(dtype), sharding=sharding)
    return Target("jax", dtype, shape, weak=bool(weak), sharding=sharding)


def _placed(sharding: Any, shape: tuple[int, ...]) -> jax.sharding.Sharding | None:
    """The sharding of a leaf on devices: an abstract mesh is that of `jax.set_mesh`.

    **Raises:** `TypeError` if there are no devices, or it cannot cut the shape.
    """
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        if mesh.empty:
            return None
        current = jax.sharding.get_mesh()
        if current.abstract_mesh != mesh:
            raise TypeError(
                f"Its sharding is on the abstract mesh {mesh}, which has no devices. "
                "Load inside `with jax.set_mesh(mesh)`, or give it a sharding."
            )
        sharding = jax.sharding.NamedSharding(current, sharding.spec)
    if sharding is not None:
        if why := _sharding.misfit(sharding, shape):
            raise TypeError(f"Its sharding does not fit its shape: {why}")
    return sharding


@ft.cache
def impl_of(dtype: object) -> str:
    """The PRNG implementation of the keys of a dtype."""
    found = []
    keys = jax.ShapeDtypeStruct((), dtype)
    jax.eval_shape(lambda k: found.append(str(jr.key_impl(k))), keys)
    return found[0]


# These are cached, so that leaves which are read alike share one `Target`: a read plans
# and makes those together.


@ft.lru_cache
def own_target(template: Template) -> Target:
    """The target of a leaf where no `like` says otherwise: as it was."""
    kind, shape = template.kind, template.logical_shape
    if kind == "key":
        return Target(kind, None, shape, impl=template.impl)
    if kind in _template.ARRAY_KINDS:
        dtype = _template.dtype_of(template.dtype)
        return Target(kind, dtype, shape, weak=template.weak)
    return Target(kind, None, shape)


@ft.lru_cache
def host_target(dtype: np.dtype, shape: tuple[int, ...], cast: bool) -> Target:
    """The target of a leaf that is read as a NumPy array."""
    return Target("numpy", dtype, shape, cast=cast)


def show_target(target: Target) -> str:
    dtype = "" if target.dtype is None else target.dtype.name
    return _folding.shown(target.kind, dtype, target.shape, target.impl)


class Misfit(NamedTuple):
    """The reason why a stored leaf cannot come back as `like` has it: its "kind",
    "shape" or "dtype", and a hint, if there is one."""

    what: str
    hint: str = ""


def misfit(template: Template, target: Target) -> Misfit | None:
    """The reason why a stored leaf does not fit a target; None if it does."""
    kinds = {template.kind, target.kind}
    if len(kinds) > 1 and not _NOT_NUMBERS.isdisjoint(kinds):
        if not _is_of_keys(template, target):
            return Misfit("kind")
        hint = "`cast=True` makes the one of the other."
        return None if target.cast else Misfit("kind", hint)
    if template.logical_shape != target.shape:
        return Misfit("shape")
    if template.kind == "key":
        return None if template.impl == target.impl else Misfit("kind")
    if template.kind in ("str", "bytes") or is_as_saved(template, target):
        return None
    saved, wanted = _leaf.saved_dtype(template), wanted_dtype(template, target)
    if wanted != saved:
        types = _template.number_type(saved), _template.number_type(wanted)
        if template.dtype == "int":
            types = "int", types[1]
        if types[0] != types[1] or types[0] == "none":
            return Misfit("dtype")
        # A single number may come back as one of another kind, and so of another dtype;
        # but not one of JAX as one of NumPy, or the other way round.
        is_free = target.shape == () and len(kinds) == 2 and kinds != {"jax", "numpy"}
        if not (target.cast or is_free):
            hint = _hint_of_numpy(template, target) or "`cast=True` converts it."
            return Misfit("dtype", hint)
    if target.kind == "jax" and not target.cast:
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            hint = (
                f"JAX would narrow it to {jax.dtypes.canonicalize_dtype(wanted)}: set "
                "`jax_enable_x64`, or load into a NumPy array, or pass `cast=True`."
            )
            return Misfit("dtype", hint)
    return None


def _is_of_keys(template: Template, target: Target) -> bool:
    """Whether typed PRNG keys are asked for, and their data is stored as legacy keys
    have it, or the other way round."""
    if target.kind == "key":
        assert target.impl is not None
        is_data = template.kind in ("jax", "numpy") and template.dtype == "uint32"
        return is_data and template.shape == target.shape + _leaf.key_shape(target.impl)
    is_data = target.kind in ("jax", "numpy") and target.dtype == np.uint32
    return template.kind == "key" and is_data and template.shape == target.shape


def as_read(template: Template, target: Target) -> Template:
    """The template of what is read: of data that is read as keys, that of keys."""
    if target.kind != "key" or template.kind == "key":
        return template
    own = Template(template.keys, "key", "key", template.shape, "uint32", ())
    return own._replace(impl=target.impl)


def _hint_of_numpy(template: Template, target: Target) -> str:
    """A hint for an array of NumPy of which `jax.eval_shape` has made a narrower one of
    JAX; "" for any other."""
    if (template.kind, target.kind) != ("numpy", "jax"):
        return ""
    saved = _leaf.saved_dtype(template)
    if saved.itemsize < 8 or jax.dtypes.canonicalize_dtype(saved) != target.dtype:
        return ""
    return (
        "it was a NumPy array, and a `like` of `ec.skeleton` keeps it as it is; "
        "`cast=True` narrows it."
    )


_NOT_NUMBERS = frozenset(("key", "str", "bytes"))


def is_as_saved(template: Template, target: Target) -> bool:
    """Whether an array has the dtype that is asked for, and JAX does not narrow it."""
    dtype = target.dtype
    if dtype is None or dtype.itemsize > 4 or template.dtype in _leaf.NOT_ARRAYS:
        return False
    return dtype == _template.dtype_of(template.dtype)


def wanted_dtype(template: Template, target: Target) -> np.dtype:
    """The dtype of what is loaded. An int of Python has the saved dtype where it may be
    beyond int64, and other scalars that of their kind."""
    if target.dtype is None:
        if target.kind == "int" and template.dtype in ("int", "uint64"):
            return _leaf.saved_dtype(template)
        return np.dtype(_template.SCALAR_KINDS[target.kind])
    if target.dtype == jax.dtypes.float0:
        return target.dtype
    return target.dtype.newbyteorder("=")


def is_spread(leaf: object) -> bool:
    """Whether several processes have parts of a leaf, or are to have."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or sharding is None:
        return False
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return not mesh.empty
    return not _leaf.is_local(sharding) and len(_sharding.processes(sharding)) > 1
