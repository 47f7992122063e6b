"""One declaration per setting: `knob()` makes a dataclass field that knows its help line, unit and range.

From one field the command line derives a TOML key, a `DIX_<SECTION>_<KEY>` variable, a flag and a docs line
(`deepinfer_cli/settings.py`, `deepinfer_cli/options.py`). Config modules import only the standard library and this file,
so that building flags never loads torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hicache.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Knob:
    """What a setting is for and which values it takes. Bounds are inclusive (`ge`, `le`) or exclusive (`gt`)."""

    help: str
    unit: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    choices: tuple[Any, ...] = ()
    common: bool = False
    aliases: tuple[str, ...] = ()


def knob(
    default: Any,
    help: str,
    *,
    unit: str = "",
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[Any, ...] = (),
    common: bool = False,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a `Knob`. `common` puts its flag into `--help`; `aliases` are foreign variable names."""
    return field(default=default, metadata={"knob": Knob(help, unit, ge, gt, le, choices, common, aliases)})


def knobs(config: Any) -> dict[str, Knob]:
    """Field name -> Knob of a config class or instance, in declaration order."""
    return {f.name: f.metadata["knob"] for f in dataclasses.fields(config) if "knob" in f.metadata}


def check_knobs(config: Any, section: str) -> None:
    """Check every knob of `config` against its range. Call it from `__post_init__`.

    Raises:
        ConfigError: names the setting, its value and the allowed range.
    """
    for name, spec in knobs(config).items():
        value = getattr(config, name)
        if value is None or value == "auto":
            continue
        where = f"{section}.{name}"
        if spec.choices and value not in spec.choices:
            raise ConfigError(f"{where} is {value!r}", hint=f"choose one of: {', '.join(map(str, spec.choices))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if (
            (spec.ge is not None and value < spec.ge)
            or (spec.gt is not None and value <= spec.gt)
            or (spec.le is not None and value > spec.le)
        ):
            raise ConfigError(f"{where} is {value!r}", hint=f"allowed: {_range(spec)}")


def _range(spec: Knob) -> str:
    parts = [f">= {spec.ge}"] if spec.ge is not None else []
    parts += [f"> {spec.gt}"] if spec.gt is not None else []
    parts += [f"<= {spec.le}"] if spec.le is not None else []
    return " and ".join(parts) + (f" {spec.unit}" if spec.unit else "")
