"""Checks of the places of a run and of its steps: whether something may be saved there,
and that no link leads there, which loads and deletions ask too."""

from collections.abc import Callable

from .._format import _files
from .._save import _options
from . import _pins
from ._steps import path_below, Steps


def check_run(steps: Steps) -> None:
    """Checks the directory of a run before something is saved there.

    **Raises:** `ValueError` or an `OSError` where no run can be saved.
    """
    _options.check_name(steps.root)
    steps.root.check_writable()
    # Nobody could tell which of the two a path means.
    if steps.root.stamp(_files.INDEX):
        raise ValueError(
            f"`{steps.root}` is a checkpoint, and no directory of a run. Nothing was "
            "saved. Choose another directory."
        )
    if steps.latest() is None:  # There may be steps of Orbax that are not read.
        steps.orbax.check_readable()


def check_not_linked(steps: Steps, step: int) -> None:
    """**Raises:** `ValueError` for a step that leads through a link."""
    if steps.is_linked(step):
        raise ValueError(
            f"`{steps.path(step)}` leads through a symbolic link, and a manager "
            "follows none. It is left as it is."
        )


def check_free(
    steps: Steps, step: int, may_replace: bool, how_to_go_on: Callable[[], str]
) -> None:
    """**Raises:** `FileExistsError` for a step that is there, and may not be replaced;
    or if the directory of the step is itself a checkpoint: a load of that path would
    take it for the step."""
    if steps.root.stamp(f"{step}/{_files.INDEX}"):
        raise FileExistsError(
            f"`{path_below(steps.root.url, str(step))}` is a checkpoint, and no step "
            "of a run. It is left as it is, and nothing was saved. Move it elsewhere, "
            "or choose another directory for the run."
        )
    found = steps.find_signature(step)
    # Where Orbax has several trees in a step, none is found.
    is_of_orbax = not found.is_ours if found else bool(steps.orbax.items(step))
    if is_of_orbax:
        raise FileExistsError(
            f"Step {step} exists already in `{steps.root}`: there is an Orbax "
            "checkpoint, which is left as it is."
        )
    if found and not may_replace:
        raise FileExistsError(
            f"Step {step} exists already, at `{steps.path(step)}`. Delete it, or "
            f"replace it with `force=True`.{how_to_go_on()}"
        )
    if found and _pins.has_pin(steps.root, step):
        raise FileExistsError(
            f"Step {step} exists already, and is pinned. Call `unpin({step})` before "
            "you replace it."
        )
