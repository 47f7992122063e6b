"""Gets the compiled CPU step ready: at once when its library exists, in the background when it has to be built first."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from csrc.loader import BuildError
from engine.models.native_model import NativeModel
from engine.native_library import default_build_dir, is_built, load_library

log = logging.getLogger(__name__)

# A build competes with the ranks that serve meanwhile.
_BUILD_NICENESS = 10


class NativeStart:
    """`model` is None until the compiled step can be used; `status` says in words what runs and why."""

    def __init__(self, build_dir: str, make: Callable[[ctypes.CDLL], NativeModel], reason: str = "") -> None:
        """make: binds a loaded library to the weights. reason: why the eager path has to stay, if so."""
        self.model: NativeModel | None = None
        self._make = make
        self._build_dir = Path(build_dir) if build_dir else default_build_dir()
        self._thread: threading.Thread | None = None
        if reason:
            self._stay_eager(reason)
        else:
            self._begin()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether the compiled step is ready, after waiting for a build that is under way."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.model is not None

    @property
    def building(self) -> bool:
        """Whether steps run eagerly only until a build is over."""
        return self.model is None and self._thread is not None and self._thread.is_alive()

    def _begin(self) -> None:
        try:
            if is_built(self._build_dir):
                self._finish()
                return
        except (BuildError, OSError) as error:
            self._fall_back(error)
            return
        self.status = "eager: the compiled step is being built"
        log.info("%s in %s", self.status, self._build_dir)
        self._thread = threading.Thread(target=self._build, name="native-build", daemon=True)
        self._thread.start()

    def _build(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BUILD_NICENESS)
        try:
            self._finish()
        except (BuildError, OSError) as error:
            self._fall_back(error)

    def _finish(self) -> None:
        self.model = self._make(load_library(self._build_dir))
        self.status = "compiled"
        log.info("the model's steps run compiled")

    def _fall_back(self, error: BuildError | OSError) -> None:
        hint = getattr(error, "hint", "")
        self._stay_eager(f"{error}" + (f" ({hint})" if hint else ""))
        log.warning("the model runs eagerly, several times slower: %s", self.status)

    def _stay_eager(self, reason: str) -> None:
        self.status = f"eager: {reason}"
        log.info("%s", self.status)
