"""One leaf to a host array and back, bit for bit."""

import collections
import functools as ft
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core as jax_core
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np

from . import _chunks, _index, _register, _sharding, _show, _team
from ._index import Template
from ._sharding import Shards


_python = {"bool": bool, "int": int, "float": float, "complex": complex}


def is_storable(x: Any) -> bool:
    """Whether a leaf is stored by default: the `filter_spec` of every call.

    These are the leaves that Equinox stores, JAX and NumPy arrays and scalars and
    Python's bool, int, float and complex, and typed PRNG keys. On the `like` side it is
    also true of `jax.ShapeDtypeStruct`. It is false of str and bytes, which are
    configuration more often than data: a `filter_spec` that is true of them stores
    them. It is true of types that were given to [`register_leaf`][].

    !!! example

        ```python
        >>> import eqx_ckpt as ec
        >>> ec.is_storable(1.0), ec.is_storable("batch"), ec.is_storable(print)
        (True, False, False)

        ```
    """
    return is_own(x) or _register.codec_of(type(x)) is not None


def is_own(x: Any) -> bool:
    """Whether a leaf is stored by default, and as what it is."""
    return isinstance(x, jax.Array) or _is_storable_type(type(x))


@ft.cache
def _is_storable_type(cls: type) -> bool:
    if issubclass(cls, (np.str_, np.bytes_)):
        return False
    numbers = (np.ndarray, np.generic, bool, int, float, complex)
    return issubclass(cls, (*numbers, jax.ShapeDtypeStruct))


def is_key(x: Any) -> bool:
    return _is_key_dtype(x.dtype)


def is_shared(leaf: Any) -> bool:
    """Whether a leaf that stands at two places is one array there, not two values."""
    return isinstance(leaf, (jax.Array, np.ndarray))


def _number_type(dtype: np.dtype) -> str:
    if dtype == np.bool_:
        return "bool"
    for name, kind in (
        ("int", jnp.integer),
        ("float", jnp.floating),
        ("complex", jnp.complexfloating),
    ):
        if jnp.issubdtype(dtype, kind):
            return name
    return "none"


@ft.cache
def _stored_as(dtype: np.dtype) -> tuple[str, str] | None:
    """The names of the dtype of an array and of the one its bytes are stored as."""
    if dtype == jax.dtypes.float0:
        return "float0", "bool"
    name = dtype.name
    if name in _index.STORED:
        return name, name
    try:
        known = _index.dtype_of(name)
    except ValueError:
        return None
    if known.itemsize != 1 or _number_type(known) == "none":
        return None
    return name, "uint8"


def describe(leaf: Any, dtype: np.dtype | None = None) -> Template:
    """How a leaf is stored, without its key path and chunks. Copies nothing.

    `dtype` is what floating arrays are cast to. **Raises:** `ValueError` or `TypeError`
    when the leaf cannot be stored, with a sentence that says why.
    """
    if isinstance(leaf, jax.Array):
        return _describe_jax(leaf, dtype)
    if isinstance(leaf, (np.ndarray, np.generic)) and not isinstance(
        leaf, (np.str_, np.bytes_)
    ):
        if isinstance(leaf, np.ma.MaskedArray):
            raise TypeError("it is a masked array. Store its `.data` and its `.mask`.")
        kind = "numpy" if isinstance(leaf, np.ndarray) else "generic"
        return _array_template(kind, leaf.shape, leaf.dtype, dtype, False)
    for kind, cls in _python.items():
        if isinstance(leaf, cls):
            if kind == "int" and not -(2**63) <= leaf < 2**63:
                size = len(_int_bytes(leaf))
                return Template("", kind, "int", (size,), "uint8", ())
            name = _index.SCALAR_KINDS[kind]
            return Template("", kind, name, (), name, ())
    if isinstance(leaf, (str, bytes)):
        kind = "str" if isinstance(leaf, str) else "bytes"
        return Template("", kind, kind, (len(_encoded(leaf)),), "uint8", ())
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(
            f"it is abstract, a `{type(leaf).__name__}` without a value. Load it first "
            "(`materialise`), or leave it out with `filter_spec` or `where`."
        )
    raise TypeError(
        f"a `{type(leaf).__name__}` cannot be stored. Leave it out with `filter_spec`, "
        "or make its type one that can be with `register_leaf`."
    )


def _describe_jax(leaf: jax.Array, dtype: np.dtype | None) -> Template:
    if isinstance(leaf, jax_core.Tracer):
        raise ValueError("it is a tracer. Save outside of `jit`, `grad` and `vmap`.")
    if leaf.is_deleted():
        raise ValueError("it has been deleted or donated, and has no value any more.")
    if _is_key_dtype(leaf.dtype):
        data = jax.eval_shape(jr.key_data, leaf)
        _check_rank(data.ndim)
        impl = jr.key_impl(leaf)
        if not isinstance(impl, str):
            raise ValueError(f"its PRNG implementation {impl} has no registered name.")
        return Template("", "key", "key", data.shape, "uint32", (), False, impl)
    return _array_template("jax", leaf.shape, leaf.dtype, dtype, leaf.weak_type)


@ft.cache
def _is_key_dtype(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


# Most leaves are like some other one.
@ft.lru_cache(maxsize=4096)
def _array_template(
    kind: str, shape: tuple[int, ...], dtype: Any, cast: np.dtype | None, weak: bool
) -> Template:
    _check_rank(len(shape))
    names = _stored_as(dtype)
    if names is None:
        raise TypeError(f"its dtype `{dtype}` cannot be stored. Store numbers.")
    if cast is not None and cast != dtype and _index.is_floating(dtype):
        names, weak = _stored_as(cast), False
        assert names is not None
    return Template("", kind, names[0], shape, names[1], (), weak)


def _check_rank(rank: int) -> None:
    if rank > _index.MAX_RANK:
        raise ValueError(
            f"it has {rank} axes, and TensorStore has at most {_index.MAX_RANK}."
        )


def check_cast(dtype: Any) -> np.dtype | None:
    """The `dtype` keyword of a save as a NumPy dtype."""
    if dtype is None:
        return None
    out = np.dtype(dtype)
    if not _index.is_floating(out) or _stored_as(out) is None:
        raise ValueError(f"`dtype` must be a floating dtype, not `{out}`.")
    return out


def _encoded(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")


def _int_bytes(n: Any) -> bytes:
    return n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)


def shard_shape(leaf: Any, template: Template) -> tuple[int, ...] | None:
    """The shape of the shards of the stored array, if it is to be stored in those."""
    if not isinstance(leaf, jax.Array) or _is_whole(leaf.sharding):
        return None
    shape = template.logical_shape
    least = _chunks.LEAST // template.itemsize
    shard = _sharding.shard_shape(leaf.sharding, shape, least)
    return None if shard is None else shard + template.shape[len(shape) :]


def holders(leaf: Any, template: Template) -> _sharding.Holders | None:
    """Which processes have which regions of the stored array of a leaf; None if it is
    each process's own."""
    if not isinstance(leaf, jax.Array) or _is_local(leaf.sharding):
        return None
    shape = template.logical_shape
    rest = tuple(slice(0, n) for n in template.shape[len(shape) :])
    found = _sharding.holders(leaf.sharding, shape)
    return tuple((region + rest, processes) for region, processes in found)


@ft.lru_cache(maxsize=1024)
def _is_local(sharding: jax.sharding.Sharding) -> bool:
    return sharding.is_fully_addressable


def stage(leaf: Any, template: Template) -> Any:
    """A leaf that stays as it is now, whatever becomes of the caller's.

    On accelerators its copy to the host has been started, and it stays only once that
    has arrived: see `is_staged` and `collect`.
    """
    if isinstance(leaf, np.ndarray):
        return np.array(leaf, order="C")
    if not isinstance(leaf, jax.Array):
        return leaf
    if template.kind == "key":
        leaf = jr.key_data(leaf)
    if _on_cpu(leaf.sharding):
        # Views, and as long as those are there JAX does not reuse the memory.
        return _views(leaf)
    shards = _sharding.shards_of(leaf)
    # The copies on the host would stay with the caller's leaf as long as that lives.
    parts = [_alike(part) for part in shards.parts]
    for part in parts:
        part.copy_to_host_async()
    return shards._replace(parts=parts)


def _alike(part: jax.Array) -> jax.Array:
    """Another jax.Array of the same memory."""
    return jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])


def _views(leaf: jax.Array) -> Any:
    """An array on CPU as NumPy has it: without a copy, so in parts if it has some."""
    if _is_whole(leaf.sharding):
        return np.asarray(leaf)
    shards = _sharding.shards_of(leaf)
    return shards._replace(parts=[np.asarray(part) for part in shards.parts])


@ft.lru_cache(maxsize=1024)
def _is_whole(sharding: jax.sharding.Sharding) -> bool:
    # Nearly all leaves have few shardings, and this takes longer than the rest.
    return sharding.is_fully_replicated


def is_staged(value: Any) -> bool:
    parts = value.parts if isinstance(value, Shards) else ()
    return not any(isinstance(part, jax.Array) for part in parts)


def collect(value: Shards) -> Shards:
    """A staged leaf whose copies have arrived: waits for them."""
    return value._replace(parts=[np.asarray(part) for part in value.parts])


class Unread(NamedTuple):
    """A leaf that is read as it is written: its elements as they are stored."""

    read: Callable[[tuple[slice, ...]], np.ndarray]


def to_host(leaf: Any, template: Template) -> np.ndarray:
    """The elements that are stored for a leaf: row-major and little-endian.

    A view of the leaf's memory where it can be: of every jax.Array on CPU that is not
    cut into shards.
    """
    if isinstance(leaf, Unread):
        return np.ascontiguousarray(leaf.read(tuple(map(slice, template.shape))))
    if isinstance(leaf, (jax.Array, Shards)):
        if isinstance(leaf, Shards) or not (
            _on_cpu(leaf.sharding) and _is_whole(leaf.sharding)
        ):
            region = tuple(slice(0, n) for n in template.shape)
            return next(to_host_by_regions(leaf, template, [region]))
    return _stored(_on_host(leaf, template), template)


# Copies from a device that are under way while the one before them is written.
PREFETCH = 4


def to_host_by_regions(
    leaf: Any, template: Template, regions: Iterable[tuple[slice, ...]]
) -> Iterator[np.ndarray]:
    """The same of some regions in turn, copying no more than a few at a time."""
    if isinstance(leaf, Unread):
        yield from map(np.ascontiguousarray, map(leaf.read, regions))
        return
    if isinstance(leaf, jax.Array):
        if template.kind == "key":
            leaf = jr.key_data(leaf)
        on_cpu = _on_cpu(leaf.sharding)
        leaf = _views(leaf) if on_cpu else _sharding.shards_of(leaf)
    if not isinstance(leaf, Shards):
        array = _on_host(leaf, template)
        for region in regions:
            yield _stored(array[region], template)
        return
    dtype = leaf.parts[0].dtype
    ahead = 0 if isinstance(leaf.parts[0], np.ndarray) else PREFETCH
    waiting: collections.deque[tuple[tuple[slice, ...], list]] = collections.deque()
    for region in regions:
        found = _sharding.pieces(leaf.regions, region)
        begun = [
            (piece.to, _begin(leaf.parts[piece.part], piece.fro)) for piece in found
        ]
        waiting.append((region, begun))
        if len(waiting) > ahead:
            yield _stored(_join(*waiting.popleft(), dtype), template)
    while waiting:
        yield _stored(_join(*waiting.popleft(), dtype), template)


def _begin(part: Any, region: tuple[slice, ...]) -> Any:
    """A region of a part; the copy to the host is started if it is on a device."""
    if isinstance(part, np.ndarray):
        return part[region]
    starts = [s.start for s in region]
    # One compiled program for all regions of a size.
    sizes = [s.stop - s.start for s in region]
    out = jax.lax.dynamic_slice(part, starts, sizes)
    out.copy_to_host_async()
    return out


def _join(
    region: tuple[slice, ...], begun: list[tuple[tuple[slice, ...], Any]], dtype: Any
) -> np.ndarray:
    if len(begun) == 1:
        return np.asarray(begun[0][1])
    out = np.empty([s.stop - s.start for s in region], dtype)
    for to, part in begun:
        out[to] = np.asarray(part)
    return out


@ft.lru_cache(maxsize=1024)
def _on_cpu(sharding: jax.sharding.Sharding) -> bool:
    return all(device.platform == "cpu" for device in sharding.device_set)


def _on_host(leaf: Any, template: Template) -> np.ndarray:
    """The numbers of a leaf as it has them: in any order and of any dtype."""
    if template.dtype == "float0":
        return np.zeros(template.shape, np.bool_)
    if isinstance(leaf, np.ndarray):
        return leaf
    if template.kind in ("str", "bytes"):
        return np.frombuffer(_encoded(leaf), np.uint8)
    if template.dtype == "int":
        return np.frombuffer(_int_bytes(leaf), np.uint8)
    if template.kind == "key":
        leaf = jr.key_data(leaf)
    return np.asarray(leaf)


# These have no array of their own dtype, but one of what is stored.
_not_arrays = frozenset(("key", "str", "bytes", "int", "float0"))


def _stored(array: np.ndarray, template: Template) -> np.ndarray:
    name = template.stored if template.dtype in _not_arrays else template.dtype
    dtype = _index.dtype_of(name)
    if array.dtype != dtype:
        # Either the cast that was asked for, or big-endian numbers.
        array = _astype(array, dtype)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    return array if name == template.stored else array.view(np.uint8)


def _astype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As a cast in JAX: what is too large becomes infinite, without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        if array.dtype.itemsize == dtype.itemsize == 1:
            # Not all pairs of small dtypes have a cast; these hold all of their values.
            array = array.astype("f4" if _number_type(dtype) == "float" else "i2")
        return array.astype(dtype)


class Target(NamedTuple):
    """How a leaf comes back: what `like` says of it."""

    kind: str
    dtype: np.dtype | None
    shape: tuple[int, ...]
    weak: bool = False
    impl: str | None = None
    sharding: jax.sharding.Sharding | None = None
    python: type | None = None
    cast: bool = False
    codec: _register.Codec | None = None


def target_of(like: Any) -> Target:
    """**Raises:** `TypeError` for a leaf that no stored leaf can stand for, and
    `ValueError` when the `to_leaf` of its type fails."""
    codec = _register.codec_of(type(like))
    if codec is not None:
        return _target_of(_register.to_leaf(like))._replace(codec=codec)
    return _target_of(like)


def _target_of(like: Any) -> Target:
    if isinstance(like, jax.Array) or isinstance(like, jax.ShapeDtypeStruct):
        if isinstance(like, jax_core.Tracer):
            raise TypeError(
                "`like` has a tracer there, which does not say where the leaf goes. "
                "Load outside of `jit`, `grad` and `vmap`, or into a skeleton."
            )
        sharding = like.sharding
        if not isinstance(like, jax.Array):
            sharding = _placed(sharding, like.shape)
            if sharding is None and _team.size() > 1:
                raise TypeError(
                    "It has no sharding. In a run of many processes every abstract "
                    "leaf needs one, such as `ec.skeleton(..., sharding=)` gives it."
                )
        elif not like.committed:
            sharding = None
        if is_key(like):
            return Target("key", None, like.shape, False, _impl(like), sharding)
        return _jax_target(like.dtype, like.shape, like.weak_type, sharding)
    if isinstance(like, np.ndarray):
        return Target("numpy", like.dtype, like.shape)
    if isinstance(like, np.generic) and not isinstance(like, (np.str_, np.bytes_)):
        return Target("generic", like.dtype, like.shape)
    for kind, cls in (*_python.items(), ("str", str), ("bytes", bytes)):
        if isinstance(like, cls):
            return Target(kind, None, (), python=type(like))
    raise TypeError(
        f"`like` has a `{type(like).__name__}` there, which nothing that is stored can "
        "stand for. Leave it out with `filter_spec`."
    )


@ft.lru_cache(maxsize=4096)
def _jax_target(
    dtype: np.dtype, shape: tuple[int, ...], weak: bool, sharding: Any
) -> Target:
    return Target("jax", dtype, shape, bool(weak), None, sharding)


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
        try:
            sharding.shard_shape(shape)
        except ValueError as e:
            raise TypeError(f"Its sharding does not fit its shape: {e}") from e
    return sharding


def _impl(key: Any) -> str:
    if isinstance(key, jax.Array):
        return str(jr.key_impl(key))
    found = []
    jax.eval_shape(lambda k: found.append(str(jr.key_impl(k))), key)
    return found[0]


def own_target(template: Template) -> Target:
    """How a leaf comes back where no `like` says otherwise: as it was."""
    kind, shape = template.kind, template.logical_shape
    if kind == "key":
        return Target(kind, None, shape, False, template.impl)
    if kind in _index.ARRAY_KINDS:
        return Target(kind, _index.dtype_of(template.dtype), shape, template.weak)
    return Target(kind, None, shape)


@ft.cache
def key_dtype(impl: str) -> Any:
    """The extended dtype of typed PRNG keys of an implementation.

    **Raises:** `ValueError` for one that this process does not have.
    """
    try:
        return jax.eval_shape(lambda: jr.key(0, impl=impl)).dtype
    except ValueError as e:
        raise ValueError(
            f"JAX does not know the PRNG implementation {impl!r} in this process. "
            "Define it before the key is used."
        ) from e


def abstract(template: Template) -> jax.ShapeDtypeStruct:
    """A stored leaf as `jax.eval_shape` would have it."""
    dtype, shape = abstract_dtype(template), template.logical_shape
    if template.kind in ("str", "bytes"):
        shape = template.shape
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=template.weak)


def abstract_dtype(template: Template) -> Any:
    if template.kind == "key":
        assert template.impl is not None
        return key_dtype(template.impl)
    if template.kind in ("str", "bytes"):
        return np.dtype(np.uint8)
    return np.dtype(np.int64) if template.dtype == "int" else _saved_dtype(template)


def _saved_dtype(template: Template) -> np.dtype:
    if template.dtype == "int":
        return np.dtype(np.object_)
    return _index.dtype_of(template.dtype)


def show(template: Template) -> str:
    """A stored leaf in a word, as in Equinox: `f32[64,64]`, `int`, `key<fry>[]`."""
    if template.kind == "key":
        return f"key<{template.impl}>[{','.join(map(str, template.logical_shape))}]"
    if template.kind not in _index.ARRAY_KINDS:
        return template.kind
    text = _show.short_array(template.dtype, template.shape)
    return text + ("(numpy)" if template.kind == "numpy" else "")


def show_target(target: Target) -> str:
    if target.kind == "key":
        return f"key<{target.impl}>[{','.join(map(str, target.shape))}]"
    if target.dtype is None:
        return target.kind
    text = _show.short_array(target.dtype.name, target.shape)
    return text + ("(numpy)" if target.kind == "numpy" else "")


class Misfit(NamedTuple):
    """Why a stored leaf cannot stand for one of `like`."""

    what: str  # "kind", "shape", "dtype"
    hint: str


def misfit(template: Template, target: Target) -> Misfit | None:
    """What keeps a stored leaf from coming back as `like` has it, if anything does."""
    if _family(template.kind) != _family(target.kind):
        return Misfit("kind", "")
    if template.logical_shape != target.shape:
        return Misfit("shape", "")
    if template.kind == "key":
        return None if template.impl == target.impl else Misfit("kind", "")
    if template.kind in ("str", "bytes"):
        return None
    saved, wanted = _saved_dtype(template), _wanted_dtype(template, target)
    if wanted != saved:
        types = _number_type(saved), _number_type(wanted)
        if template.dtype == "int":
            types = "int", types[1]
        if types[0] != types[1] or types[0] == "none":
            return Misfit("dtype", "")
        if not (target.cast or _is_other_scalar(template, target)):
            return Misfit("dtype", "`cast=True` converts it.")
    if target.kind == "jax" and not target.cast:
        if jax.dtypes.canonicalize_dtype(wanted) != wanted:
            hint = (
                f"JAX would narrow it to {jax.dtypes.canonicalize_dtype(wanted)}: set "
                "`jax_enable_x64`, or load into a NumPy array, or pass `cast=True`."
            )
            return Misfit("dtype", hint)
    return None


def _family(kind: str) -> str:
    return kind if kind in ("key", "str", "bytes") else "number"


def _wanted_dtype(template: Template, target: Target) -> np.dtype:
    if target.dtype is None:
        if target.kind == "int" and template.dtype in ("int", "uint64"):
            return _saved_dtype(template)
        return np.dtype(_index.SCALAR_KINDS[target.kind])
    if target.dtype == jax.dtypes.float0:
        return target.dtype
    return target.dtype.newbyteorder("=")


def _is_other_scalar(template: Template, target: Target) -> bool:
    def category(kind: str) -> str:
        return "array" if kind in ("jax", "numpy") else kind

    return target.shape == () and category(template.kind) != category(target.kind)


def _result_dtype(template: Template, target: Target) -> np.dtype:
    wanted = _wanted_dtype(template, target)
    if target.kind == "jax":
        wanted = jax.dtypes.canonicalize_dtype(wanted)
    return wanted


def is_spread(leaf: Any) -> bool:
    """Whether several processes have parts of a leaf, or are to have."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or sharding is None:
        return False
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return not mesh.empty
    return not _is_local(sharding)


def without_replicas(target: Target) -> Target:
    """The same leaf with each part of it in one process, if it can be so."""
    sharding = target.sharding
    if sharding is None or _is_local(sharding) or target.kind != "jax" or target.weak:
        return target
    if target.codec is not None:
        return target
    return target._replace(sharding=_sharding.without_replicas(sharding, target.shape))


def regions(target: Target) -> list[tuple[slice, ...]] | None:
    """The parts of a leaf that are read each into memory of its own, for the devices of
    this process; None if it is read as one."""
    if target.sharding is None or target.kind != "jax":
        return None
    if _is_local(target.sharding) and (target.weak or _is_whole(target.sharding)):
        return None
    return _sharding.here(target.sharding, target.shape).regions


class Conversion(NamedTuple):
    """What has to be done to the numbers of an array, all of it or some at a time."""

    dtype: np.dtype
    convert: Callable[[np.ndarray], np.ndarray]


def conversion(template: Template, target: Target) -> Conversion | None:
    """What `from_host` would do to the numbers of an array, if anything."""
    if template.dtype in _not_arrays or target.kind not in _index.ARRAY_KINDS:
        return None
    dtype, wanted = _index.dtype_of(template.dtype), _result_dtype(template, target)
    if dtype == wanted:
        return None

    def convert(part: np.ndarray) -> np.ndarray:
        return _convert(part.view(dtype), target, wanted)

    return Conversion(wanted, convert)


def from_host(
    arrays: Sequence[np.ndarray],
    template: Template,
    target: Target,
    owned: bool,
    converted: bool = False,
) -> Any:
    """The leaf that `target` asks for, of the stored array, or of its `regions`.

    `owned` says that nobody else has their memory: it may become the leaf's;
    `converted` that they come out of the leaf's `conversion`.
    **Raises:** `ValueError` when the value does not survive the conversion.
    """
    if target.codec is not None:
        plain = target._replace(codec=None)
        leaf = from_host(arrays, template, plain, owned, converted)
        return _register.from_leaf(target.codec, leaf)
    if regions(target) is None:
        return _from_host(arrays[0], template, target, owned, converted)
    assert target.sharding is not None
    host = target._replace(kind="numpy", dtype=_result_dtype(template, target))
    parts = [_from_host(x, template, host, owned, converted) for x in arrays]
    out = _sharding.assemble(target.sharding, target.shape, parts)
    if not target.weak:
        return out
    weaken = jax.jit(_weak_like, out_shardings=target.sharding)
    weak = weaken(out)
    return weak if weak.dtype == out.dtype else out


def _from_host(
    array: np.ndarray,
    template: Template,
    target: Target,
    owned: bool,
    converted: bool = False,
) -> Any:
    if target.kind in ("str", "bytes"):
        data = array.tobytes()
        out = data if target.kind == "bytes" else data.decode("utf-8", "surrogatepass")
        return out if target.python in (None, str, bytes) else target.python(out)
    if target.kind == "key":
        if target.sharding is not None and not _is_local(target.sharding):
            parts = [
                array[region]
                for region in _sharding.here(target.sharding, target.shape).regions
            ]
            data = _sharding.assemble(target.sharding, array.shape, parts)
            return jr.wrap_key_data(data, impl=target.impl)
        key = jr.wrap_key_data(jnp.asarray(array), impl=target.impl)
        return key if target.sharding is None else jax.device_put(key, target.sharding)
    if template.dtype == "float0":
        array = np.zeros(template.shape, jax.dtypes.float0)
        return array[()] if target.kind == "generic" else array
    if template.dtype == "int":
        value = int.from_bytes(array.tobytes(), "little", signed=True)
        array, owned = np.asarray(value, object), True
    elif template.stored != template.dtype and not converted:
        array = array.view(_index.dtype_of(template.dtype))
    # Nearly all leaves skip this. Numbers of 64 bits are those that JAX may narrow.
    if not converted and (array.dtype != target.dtype or array.dtype.itemsize > 4):
        wanted = _result_dtype(template, target)
        if array.dtype != wanted:
            array, owned = _convert(array, target, wanted), True
    if target.kind == "jax":
        return _to_jax(array, target, owned)
    if target.kind == "numpy":
        assert target.dtype is not None
        array = array.astype(target.dtype, copy=not owned)
        return array
    if target.kind == "generic":
        return array.astype(target.dtype)[()]
    value = array.item()
    python = target.python or _python[target.kind]
    return value if type(value) is python else python(value)


# Below this many bytes one `jnp.asarray`, which copies, beats `jax.device_put`, which
# on CPU takes aligned memory as it is.
_ALIAS_BYTES = 1 << 16

BATCH = 128


def is_plain_small(target: Target, array: np.ndarray) -> bool:
    """Whether `batch_to_jax` makes the leaf that `target` asks for of `array`."""
    return (
        target.kind == "jax"
        and not target.weak
        and target.sharding is None
        and target.codec is None
        and array.dtype == target.dtype
        and array.dtype.itemsize <= 4
        and array.nbytes < _ALIAS_BYTES
    )


@jax.jit
def batch_to_jax(*arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """New jax arrays, which are uncommitted. A compiled function takes and returns many
    at a third of what it costs to make each alone."""
    return arrays  # pyright: ignore[reportReturnType]


def _weak_like(x: Any) -> jax.Array:
    """The same numbers, weakly typed where JAX has such a dtype."""
    # There is no public function for this. Numbers of Python are weakly typed, and an
    # array stays so while it is only updated.
    zero = {"bool": False, "int": 0, "float": 0.0, "complex": 0j}
    weak = jnp.full(x.shape, zero[_number_type(x.dtype)])
    return weak.at[...].set(x) if weak.dtype == x.dtype else weak


def _to_jax(array: np.ndarray, target: Target, owned: bool) -> jax.Array:
    if target.weak:
        out = _weak_like(array)
        if out.dtype == array.dtype and out.weak_type:
            return jax.device_put(out, target.sharding) if target.sharding else out
    if target.sharding is not None:
        return jax.device_put(array if owned else array.copy(), target.sharding)
    if owned and array.nbytes >= _ALIAS_BYTES:
        return jax.device_put(array)
    return jnp.array(array)


def _convert(array: np.ndarray, target: Target, wanted: np.dtype) -> np.ndarray:
    if target.kind == "jax" and target.dtype != wanted and not target.cast:
        raise ValueError(
            f"JAX would narrow {target.dtype} to {wanted}: set `jax_enable_x64`, or "
            "read it into NumPy, as `np.asarray` does"
        )
    kind = _number_type(wanted)
    if kind == "int" and array.size:
        low, high = int(array.min()), int(array.max())
        info = ml_dtypes.iinfo(wanted)
        if low < info.min or high > info.max:
            value = low if low < info.min else high
            raise ValueError(f"{value} does not fit into {wanted}")
    out = _astype(array, wanted)
    if kind != "int" and not target.cast:
        # One scalar as another kind of scalar: it has to be the same number.
        value, back = complex(array.item()), complex(out.item())
        for x, y in ((value.real, back.real), (value.imag, back.imag)):
            if x != y and not (math.isnan(x) and math.isnan(y)):
                raise ValueError(f"{array.item()} is not a {wanted} exactly")
    return out
