"""Where rows of several ranks meet in a prompt step of the compiled CPU step: it calls back for every gather."""

from __future__ import annotations

from engine.models.native_experts import floats_at
from engine.models.native_layout import GATHER
from engine.models.shared_inputs import ContextShare


class Meeting:
    """Lends one step its gathers. `raise_error` after the step: an exception cannot pass through the compiled code."""

    def __init__(self, gathers: ContextShare) -> None:
        self._gathers = (gathers.keys, gathers.kept, gathers.outputs, gathers.own)  # in the order of `Gathered` in cpu_step.h
        self._error: BaseException | None = None
        self.function = GATHER(self._run)

    def raise_error(self) -> None:
        """Raise what a gather raised. The numbers of the step are then meaningless."""
        if self._error is not None:
            raise self._error

    def _run(self, what: int, mine: int | None, count: int, width: int, out: int | None, rows: int) -> None:
        if self._error is not None:
            return
        try:
            gather = self._gathers[what]
            assert gather is not None, "rows that decoder layers keep, in a step without compact truncation"
            floats_at(out, rows, width).copy_(gather(floats_at(mine, count, width)))
        except BaseException as error:
            self._error = error
