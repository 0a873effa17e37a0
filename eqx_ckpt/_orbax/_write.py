"""`write_orbax`: the files for Orbax, added to a checkpoint that is there."""

import contextlib
import functools as ft
import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .._kernel._format import _files, _index, _layouts, _ocdbt
from .._kernel._load import _checkpoint, _published
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._load._source import Source
from .._kernel._runtime import _arguments
from .._kernel._save import _background, _payload
from .._kernel._save._path_state import PathState, replaced_error
from .._kernel._save._plan import Plan
from .._kernel._save._transaction import drop_unlisted, errors_before_commit, take_back
from .._kernel._save._tree_spec import TreeSpec
from .._kernel._storage import _root, _store
from .._kernel._storage._backend import Backend, Value
from .._kernel._storage._local import LocalDirectory
from . import _metadata


def files_of_save(plan: Plan, save: str, manifest: bytes) -> dict[str, bytes]:
    """The files for Orbax of a save that is being written. `manifest` is that of its
    database, with `layout="ocdbt"`."""
    spec, layout = plan.spec, plan.options.layout
    if layout in _layouts.PACKED and not spec.has_database:
        return {}
    texts = []
    if "str" in {template.kind for template in spec.templates}:
        texts = [
            (leaf_index, bytes(_payload.whole(leaf)).decode("utf-8", "surrogatepass"))
            for leaf_index, leaf in enumerate(plan.leaves)
            if leaf.template.kind == "str"
        ]
    facts = plan.facts
    own = _metadata.files(spec, tuple(texts), facts.record, facts.wholes, layout)
    return own | _root_manifest(save, manifest)


def _root_manifest(save: str, manifest: bytes) -> dict[str, bytes]:
    """The manifest of the same database, seen from the root of the checkpoint."""
    if not manifest:
        return {}
    return {"manifest.ocdbt": _ocdbt.moved(manifest, "tree", f"d/{save}/")}


@_arguments.checked()
def write_orbax(path: str | os.PathLike[str]) -> None:
    """Adds the files with which Orbax restores a checkpoint to one that is there.

    The checkpoint then is as if it had been saved with `orbax=True`: the arrays stay
    where they are, and its save id stays. Orbax finds all of the checkpoint or nothing.
    The call returns once the files would survive a power cut.

    **Arguments:**

    - `path`: the checkpoint, in a directory or at a URL; that of a run stands for its
        newest step.

    **Returns:** None.

    **Raises:** before anything is written, `FileNotFoundError` if there is no
    checkpoint; `ValueError` for one that is in one file, of another format, or has
    parts of arrays or more than 2^20 chunks: [`convert`][] with `orbax=True` makes one
    for Orbax of most of these. `RuntimeError` if another writer replaced the checkpoint
    meanwhile.

    !!! example

        ```python
        >>> import eqx_ckpt as ec, jax.numpy as jnp, pathlib
        >>> ec.tree_serialise_leaves("step", {"w": jnp.ones(3)})
        >>> ec.write_orbax("step")
        >>> sorted(x.name for x in pathlib.Path("step").iterdir())
        ['_METADATA', '_sharding', 'd', 'eqx_ckpt.json', 'manifest.ocdbt']

        ```
    """
    _background.wait_for(_root.resolve(path))
    ckpt = _checkpoint.open(path)
    source = _checkpoint.source_of(ckpt)
    root = source.root.real()
    root.check_writable()
    _check_writable(source)
    files = _files_of(ckpt)
    with contextlib.ExitStack() as held, contextlib.ExitStack() as undo:
        with contextlib.suppress(FileNotFoundError):
            held.enter_context(root.lock(wait=True))
        published = _published.read_index(root, _index.decode)
        if published is None or published.content.save != ckpt.save_id:
            raise source.error_for("")
        index, found = published.content, published.file
        others = index.others | dict(zip(files, map(_index.digest, files.values())))
        data = _index.with_others(found.data, others)
        addition = _Addition(files, data, found)
        with errors_before_commit(root):
            if isinstance(root, LocalDirectory):
                added = _store.tops_of(files).keys() - _store.tops_of(index.others)
                # They are deleted the other way round, and so the last one first.
                for key in _in_order(added):
                    undo.callback(take_back, root, key)
                addition.put(root, index.save)
            else:
                stamps: dict[str, str] = {}
                undo.callback(_drop_if_possible, root, stamps)
                addition.put_in_store(root, stamps)
        undo.pop_all()


def _drop_if_possible(root: Backend, stamps: dict[str, str]) -> None:
    with contextlib.suppress(OSError, ValueError):
        drop_unlisted(root, stamps)


def _check_writable(source: Source) -> None:
    """**Raises:** `ValueError` for a checkpoint that can have no files for Orbax."""
    index, cure = source.index, "`ec.convert` with `orbax=True` writes one for Orbax"
    if not (source.has_digests and source.is_ours):
        kind = "in one file" if source.has_digests else f"of {index.layout}"
        why = f"it is a checkpoint {kind}, and not in a directory of ours"
    elif index.leaves.parts:
        why, cure = "it has parts of arrays", "Load it, and save it whole"
    elif why := _layouts.unopened_by_others(index.layout, index.leaves.templates):
        why = f"Orbax reads by TensorStore, and {why}"
    elif source.database is not None and _manifest_key(source) not in index.others:
        why, cure = "it has very many chunks", f"{cure}, if `chunks` are larger"
    else:
        return
    raise ValueError(f"`{source.root}` is left without files for Orbax: {why}. {cure}.")


def _manifest_key(source: Source) -> str:
    return f"{source.database}/manifest.ocdbt"


def _files_of(ckpt: Checkpoint) -> dict[str, bytes]:
    source = _checkpoint.source_of(ckpt)
    index, leaves = source.index, source.index.leaves
    record = leaves.tree
    if record is None:
        raise ValueError(f"`{source.root}` does not say of what tree it is.")
    # Whatever cannot be read cannot be told to others.
    names = tuple(x.name for x in leaves.records())
    template_of = tuple(map(int, leaves.template_of))
    aliases = tuple(sorted(leaves.aliases.items()))
    spec = TreeSpec(names, template_of, tuple(leaves.templates), aliases)
    texts = [
        (leaf_index, ckpt[name].read())
        for leaf_index, name in enumerate(names)
        if spec.templates[template_of[leaf_index]].kind == "str"
    ]
    files = _metadata.files(spec, tuple(texts), record, ("",), index.layout)
    if source.database is None:
        return files
    key = _manifest_key(source)
    value = source.directory.read(key)
    if value is None or _index.digest(value.data) != index.others[key]:
        raise source.error_for(f"`{key}` is not as it was written")
    return files | _root_manifest(index.save, value.data)


class _Addition(NamedTuple):
    """The files to be added, the index with their digests, and the one that was
    found."""

    files: Mapping[str, bytes]
    index: bytes
    found: Value

    def put(self, root: LocalDirectory, save: str) -> None:
        """Writes the files, and then the index. Orbax finds nothing until it finds the
        last of the files."""
        staged = ft.partial(_files.staged, f"d/{save}")
        is_new = not root.is_directory(f"d/{save}")  # With `layout="zarr"`.
        root.make_directories([f"d/{save}"])
        for key, data in {**self.files, _files.INDEX: self.index}.items():
            root.delete(staged(key))  # Of a call that was killed.
            root.write(staged(key), [data], sync=True)
        for key in _in_order(self.files):
            root.rename_over(staged(key), key)
        inside = {key.rpartition("/")[0] for key in self.files}
        root.sync_directories({*inside, ""})
        index = staged(_files.INDEX)
        if not root.replace(_files.INDEX, self.index, self.found, index):
            raise self._replaced_error(root)
        if is_new:
            root.drop_directory(f"d/{save}")
            root.drop_directory("d")
        root.sync_directories([""])

    def put_in_store(self, root: Backend, stamps: dict[str, str]) -> None:
        """Does what `put` does, in a store, where no lock keeps others away: each file
        is written only if the index is as it was found, or as it is to be, and nobody
        has written that file since. Adds the `stamps` of what it has written."""

        def put(key: str) -> None:
            written = None
            while written is None:
                before, now = root.read(key), root.read(_files.INDEX)
                if now is None or now.data not in (self.found.data, self.index):
                    raise self._replaced_error(root)
                written = root.replace(key, self.files[key], before)
            stamps[key] = written.generation.hex()

        *first, last = _in_order(self.files)
        _store.each(root, put, first)
        put(last)
        if root.replace(_files.INDEX, self.index, self.found) is None:
            raise self._replaced_error(root)
        # Another call, which has written the same file and failed, may have deleted it
        # before the index listed it.
        if lost := [key for key in _in_order(self.files) if not root.has(key)]:
            for key in lost:
                if written := root.replace(key, self.files[key], None):
                    stamps[key] = written.generation.hex()
            # If the whole save is gone, they go too.
            drop_unlisted(root, stamps)

    def _replaced_error(self, root: Backend) -> Exception:
        return replaced_error(root, PathState(self.found, frozenset()))


def _in_order(files: Iterable[str]) -> list[str]:
    """The files as they are written: without the last one Orbax finds nothing."""
    return sorted(files, key=_metadata.LAST.__eq__)
