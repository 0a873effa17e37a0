"""`steps`, `runs`, `delete`, `verify` and `clean`."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import click

from .._kernel._errors import DamagedError
from .._kernel._load._checkpoint import Checkpoint
from .._kernel._run import _clean, _pins, _records, _removal, _run_path
from .._kernel._run._steps import Steps
from .._kernel._save import _delete
from .._kernel._storage import _root
from .._near import _superseded
from .._show import _facts, _summary
from .._show._tables import Span
from .._show._terminal import Line
from .._verify import _verify
from . import _output, _paths, _run_info
from ._output import CommandResult


def steps(
    path: str,
    best: str | None,
    is_max: bool,
    pin: tuple[int, ...],
    unpin: tuple[int, ...],
    delete: tuple[int, ...],
    yes: bool,
) -> CommandResult:
    run = _run(path)
    acts = [
        ("Pin", _pins.pin, pin),
        ("Unpin", _pins.unpin, unpin),
        ("Delete", _removal.delete_step, delete),
    ]
    for what, act, those in acts:
        for step in those:
            asked = f"{what} step {step} of {run.root.url}?"
            if not yes:
                # It is read from the terminal: what is printed there is no answer.
                click.confirm(_output.drawn(asked, False), abort=True, err=True)
            act(run, step)
    way = None if best is None else (best, "max" if is_max else "min")
    return _run_info.of_run(run, way)


def _run(path: str) -> Steps:
    found = _paths.open_any(path)
    if isinstance(found, Checkpoint):
        raise ValueError(f"`{found.path}` is a checkpoint, not the directory of a run.")
    return found


def runs(directory: str, sort: str | None, is_max: bool) -> CommandResult:
    way = None if sort is None else (sort, "max" if is_max else "min")
    top = _root.resolve(directory).target()
    return _run_info.of_runs(top, _records.runs(directory, best=way))


def delete(path: str, yes: bool) -> CommandResult:
    what = _deleted_at(path)
    if not yes and what:
        click.confirm(_output.drawn(f"Delete {what}?", False), abort=True, err=True)
    _delete.delete(path)
    return CommandResult({"path": path, "deleted": True}, [f"Deleted {what}"])


def _deleted_at(path: str) -> str:
    """The checkpoint or the run that is deleted, in words; "" if there is neither."""
    if _delete.exists(path):
        return f"the checkpoint at {_root.resolve(path).url}"
    run = _run_path.run_at(path)
    if run is None:
        return ""
    count = len(run.complete())
    return f"the run at {run.root.url} with {_facts.counted(count, 'step')}"


def verify(path: str, progress: bool) -> CommandResult:
    with contextlib.suppress(DamagedError):  # It is a problem, which `verify` says.
        found = _paths.open_any(path)
        if isinstance(found, Steps):
            return _verify_run(found, progress)
        path = found.path
    problems = list(map(str, _verify.verify(path, progress=progress)))
    return CommandResult(
        {"path": path, "problems": problems}, problems, 1 if problems else 0
    )


def _verify_run(run: Steps, progress: bool) -> CommandResult:
    summaries = _summary.summaries(run)
    steps: list[dict[str, Any]] = []
    for number, x in enumerate(summaries, 1):
        if sys.stderr.isatty():
            click.echo(f"step {x.step} ({number} of {len(summaries)})", err=True)
        problems = [x.why]
        if x.state == "complete" and not x.is_ours:
            problems = ["not verified: Orbax has saved it, which writes no digests"]
        elif x.state == "complete":
            found = _verify.verify(run.path(x.step), progress=progress)
            problems = list(map(str, found))
        steps.append({"step": x.step, "state": x.state, "problems": problems})
    is_bad = any(x["problems"] for x in steps if x["state"] != "incomplete")
    data = {"path": run.root.url, "steps": steps}
    return CommandResult(data, _verified(steps), 1 if is_bad else 0)


def _verified(steps: list[dict[str, Any]]) -> Iterator[Line]:
    for x in steps:
        head = Span(f"{x['step']:>8}  ", "name")
        if not x["problems"]:
            yield [head, Span("undamaged", "good")]
        style = "odd" if x["state"] == "incomplete" else "bad"
        for problem in x["problems"]:
            yield [head, Span(problem, style)]
            head = Span(" " * 10)


def clean(path: str, lists: bool, idle: bool) -> CommandResult:
    found = _clean.clean(path, remove=not lists, idle=idle)
    data: dict[str, Any] = {"leftovers": found, "deleted": not lists}
    near = [] if "://" in path else _superseded.near_saves(_root.resolve(path))
    if near:
        data["near"] = [save._asdict() for save in near]
    told = {save.path for save in near}
    lines = [*(path for path in found if path not in told), *map(str, near)]
    return CommandResult(data, lines)
