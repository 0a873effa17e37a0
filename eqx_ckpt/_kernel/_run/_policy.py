"""The policy of a run: steps that are saved, the best one, and steps that stay."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .._runtime import _arguments
from .._save._options import SaveOptions
from .._tree import _nearest
from ._step import Step


class Policy(NamedTuple):
    """The arguments of a `CheckpointManager` that are not those of each save."""

    keep: int | None = None
    keep_every: int | None = None
    keep_nearest: int | None = None
    keep_seconds: int | float | None = None
    best: tuple[str, str] | None = None
    keep_best: int | None = None
    keep_if: Callable[[Step], Any] | None = None
    every: int | None = None
    every_seconds: int | float | None = None
    reuse: bool = True

    def check_options(self, options: SaveOptions) -> None:
        """**Raises:** `ValueError` for what makes no sense together."""
        if self.keep_best is not None and self.best is None:
            raise ValueError(
                "`keep_best` says how many of the best steps to keep: give `best` too, "
                'as in `best=("loss", "min")`.'
            )
        for name, default in self._field_defaults.items():
            is_given = getattr(self, name) is not default
            if self.keep is None and name.startswith("keep_") and is_given:
                raise ValueError(
                    f"`{name}` is for steps that `keep` would let go, and without it "
                    f"all stay: give `keep` too, or leave `{name}` out."
                )
        if self.keep is not None and not options.durable:
            raise ValueError(
                "`keep` deletes older steps, which is safe only once the new one would "
                "survive a power cut: leave `durable` as it is, or `keep` out."
            )
        tag = _arguments.together(options.processes).tag
        if options.processes == "own" or tag is not None:
            raise ValueError(
                '`processes` of a manager is "all", or an `ec.Together` without `tag`: '
                "all processes of a run save together, and calls meet by the step."
            )

    def is_due(self, step: int, last: float = -math.inf) -> bool:
        """Whether a step is due if the last save began at `last`, in seconds of
        `time.monotonic`. Without `last`: whether it may be due, of which all processes
        know the same. With `every_seconds` process 0 then asks the clock."""
        if self.every is not None and step % self.every == 0:
            return True
        if self.every_seconds is None:
            return self.every is None
        return time.monotonic() - last >= self.every_seconds

    @property
    def has_rank(self) -> bool:
        """Whether metrics say which steps stay."""
        return self.best is not None or self.keep_if is not None

    @property
    def needs_times(self) -> bool:
        """Whether `stay` goes by the times of saves, which it is not given else."""
        return self.keep_seconds is not None

    def has_metric(self, known: Mapping[int, dict[str, Any]]) -> bool:
        """Whether a step has the metric of `best`, if that is given."""
        return self.best is None or any(self.best[0] in of for of in known.values())

    def check_metric(self, known: Mapping[int, dict[str, Any]]) -> None:
        """**Raises:** `ValueError` if steps have metrics, and none has that of `best`:
        it is misspelt."""
        names = dict.fromkeys(name for metrics in known.values() for name in metrics)
        if self.best is not None and names and not self.has_metric(known):
            raise ValueError(
                f"`best` is by the metric `{self.best[0]}`, which no step has. They "
                f"have {nearest(self.best[0], names)}."
            )

    def best_of(self, known: Mapping[int, dict[str, Any]]) -> int | None:
        """The step with the best metric, if one has it."""
        return next(iter(self.ranked(known)), None)

    def ranked(self, known: Mapping[int, dict[str, Any]]) -> list[int]:
        """The steps that have the metric of `best`, the best first; of equal ones the
        newest."""
        if self.best is None:
            return []
        metric, way = self.best
        sign = 1 if way == "max" else -1
        values = {step: of.get(metric) for step, of in known.items()}
        ranked = [
            (sign * value, step)
            for step, value in values.items()
            if isinstance(value, int | float) and -math.inf < value < math.inf
        ]
        return [step for _, step in sorted(ranked, reverse=True)]

    def superseding(self, counting: Mapping[int, dict[str, Any]], new: int) -> set[int]:
        """The steps because of which others may go: the newest, and the best of those
        that count."""
        assert self.keep is not None
        # A step that was just saved stays, also if it is an older one.
        best = self.ranked(counting)[: self.keep_best or 1]
        return {new, *sorted(counting)[-self.keep :], *best}

    def stay(
        self,
        known: Mapping[int, dict[str, Any]],
        counting: Mapping[int, dict[str, Any]],
        new: int,
        times: Mapping[int, int | None],
        own_count: int,
    ) -> set[int]:
        """The steps of those `known` that stay beside the `superseding` ones once a new
        one is saved. `times` has the seconds at which steps were saved, if the policy
        `needs_times`; a step without a time stays. An earlier attempt has left a step
        that is not in `counting`. It stays until this attempt has `keep` steps; it has
        `own_count` now. A rule that compares steps does so among those that count, and
        among those that were left, alone."""
        assert self.keep is not None
        if not self.has_metric(counting):
            return {*known}
        left = known.keys() - counting.keys()
        found = {*left} if own_count < self.keep else set()
        if self.keep_every is not None:
            found |= {step for step in known if step % self.keep_every == 0}
        if self.keep_nearest is not None:
            for some in (counting, left):
                found |= _nearest_to_multiples(some, self.keep_nearest)
        if self.keep_seconds is not None:
            # Times are whole seconds, rounded down.
            since = (times.get(new) or 0) - self.keep_seconds - 1
            found |= {s for s in known if (time := times[s]) is None or time > since}
        return found


def nearest(name: str, names: Mapping[str, Any]) -> str:
    """The metrics that are called nearly as one, or else all, in words."""
    near = _nearest.NameIndex(names).nearest(name, 3)
    return ", ".join(f"`{name}`" for name in near or names)


def _nearest_to_multiples(steps: Iterable[int], every: int) -> set[int]:
    """The step that is nearest to each multiple but 0; of two that are equally near,
    the first. A step counts only for the multiples next to it."""
    out: dict[int, int] = {}
    for step in sorted(steps):
        below = step // every * every
        for multiple in {below, below + every if below < step else below} - {0}:
            other = out.setdefault(multiple, step)
            if abs(step - multiple) < abs(other - multiple):
                out[multiple] = step
    return {*out.values()}
