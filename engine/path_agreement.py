"""How ranks that need each other in a step come to run it the same way."""

from __future__ import annotations

from csrc.loader import BuildError
from engine.distributed import Group
from engine.errors import MachineError
from engine.native_start import NativeStart


class PathAgreement:
    """Ranks that share experts or prompts run compiled steps together or not at all. Each casts two votes while the runners are made:
    whether it could, and whether it does."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._reached = False

    def reach(self, ready: bool) -> None:
        """Raises BuildError when this rank is ready and another is not."""
        if self._group is None:
            return
        self._reached = True
        [somebody_waits] = self._group.max([int(not ready)])
        if ready and somebody_waits:
            raise BuildError("another rank cannot run compiled steps", hint="see its log")

    def conclude(self, native: NativeStart) -> None:
        """Tell the others about a failure before the first vote, or learn of one behind it.

        Raises:
            MachineError: the ranks' paths differ.
        """
        if self._group is None:
            return
        if native.model is None and not self._reached:
            self.reach(False)
        compiled = native.model is not None
        if self._group.max([int(compiled), int(not compiled)]) == [1, 1]:
            raise MachineError(
                f"some ranks run compiled steps and some do not (here: {native.status})",
                hint="see the ranks' logs, or start with --set engine.enforce_eager=true",
            )
