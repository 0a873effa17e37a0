"""Which steps are saved, which is the best, and which stay."""

import numbers
import time
from collections.abc import Mapping
from typing import Any, NamedTuple


class Policy(NamedTuple):
    """See `CheckpointManager`."""

    every: int | None
    every_seconds: int | float | None
    keep: int | None
    keep_every: int | None
    best: tuple[str, str] | None

    def check(self) -> None:
        """**Raises:** `ValueError` for what a policy cannot be."""
        given = {
            "keep": self.keep,
            "keep_every": self.keep_every,
            "every": self.every,
        }
        for name, number in given.items():
            if number is None:
                continue
            if not (isinstance(number, numbers.Integral) and number >= 1):
                raise ValueError(f"`{name}` must be an integer >= 1, not {number!r}.")
        best = self.best
        if best is not None and tuple(best)[1:] not in (("min",), ("max",)):
            raise ValueError(
                f'`best` must be `(metric, "min")` or `(metric, "max")`, not {best!r}.'
            )

    def may_be_due(self, step: int) -> bool:
        """All processes know alike; with `every_seconds` process 0 has to decide."""
        if self.every is not None and step % self.every == 0:
            return True
        return self.every is None or self.every_seconds is not None

    def is_due(self, step: int, last: float) -> bool:
        """Whether a step that may be due is, if the last save was at a time."""
        if self.every is not None and step % self.every == 0:
            return True
        seconds = self.every_seconds
        return seconds is None or time.monotonic() - last >= seconds

    def best_of(self, known: Mapping[int, dict[str, Any]]) -> int | None:
        """The step with the best metric, if one has it."""
        if self.best is None:
            return None
        metric, way = self.best
        sign = 1 if way == "max" else -1
        values = {step: of.get(metric) for step, of in known.items()}
        ranked = [
            (sign * value, step)
            for step, value in values.items()
            if isinstance(value, int | float)
        ]
        return max(ranked)[1] if ranked else None

    def reasons(self, known: Mapping[int, dict[str, Any]], new: int) -> set[int]:
        """The steps because of which others may go: the newest, and the best."""
        assert self.keep is not None
        # Who went back to an older step keeps what was just saved.
        found = {new, *sorted(known)[-self.keep :]}
        best = self.best_of(known)
        return found if best is None else found | {best}

    def stay(self, known: Mapping[int, dict[str, Any]], new: int) -> set[int]:
        """The steps that stay once a new one is saved."""
        found = self.reasons(known, new)
        every = self.keep_every
        return found.union(s for s in known if every is not None and s % every == 0)
