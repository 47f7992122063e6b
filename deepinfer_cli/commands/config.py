"""`dix config`: what is set, where it came from, and where files are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.invocation import Invocation
from deepinfer_cli.lazy import Lazy
from deepinfer_cli.options import command
from deepinfer_cli.outputs import write_text
from deepinfer_cli.settings import SECTIONS, Setting, all_settings, suggest
from hicache.errors import ConfigError

Section = Annotated[str | None, typer.Argument(metavar="SECTION", help="engine, hicache, server, bench or ui.")]


def _show(call: Invocation, section: Section = None) -> int:
    """Show every setting that is not at its default; with a section, all of its settings.

      dix config show             what differs from the defaults
      dix config show engine      everything of one section, with its source

    Next: dix config list
    """
    from deepinfer_cli.ui import Column

    chosen = _settings_of(section)
    if call.json:
        values = {s.key: {"value": call.resolved.values[s.key].value, "source": call.resolved.values[s.key].source} for s in chosen}
        call.ui.document("dix.config/1", {"settings": values})
        return ExitCode.OK
    rows = []
    for setting in chosen:
        value = call.resolved.values[setting.key]
        if section or value.source != "default":
            rows.append(
                (setting.key, _text(value.value), value.source, f"default {_text(setting.default)}" if value.source != "default" else "")
            )
    if rows:
        call.ui.table(
            [Column("setting", right=False, role="accent"), Column("value"), Column("source", right=False), Column("", right=False)], rows
        )
    else:
        call.ui.note("every setting is at its default")
    return ExitCode.OK


def _list(call: Invocation, section: Section = None) -> int:
    """List every setting with its flag, its variable, its default and what it does.

      dix config list engine

    Next: dix config show
    """
    from deepinfer_cli.ui import Column

    chosen = _settings_of(section)
    if call.json:
        rows = [
            {"key": s.key, "flag": s.flag, "variable": s.variable, "default": s.default, "unit": s.knob.unit, "help": s.knob.help}
            for s in chosen
        ]
        call.ui.document("dix.settings/1", {"settings": rows})
        return ExitCode.OK
    columns = [Column("setting", right=False, role="accent"), Column("flag", right=False), Column("default"), Column("", right=False)]
    call.ui.table(columns, [(s.key, s.flag, _text(s.default), s.knob.help) for s in chosen])
    call.ui.note(f"the variable of a setting is DIX_<SECTION>_<KEY>, for example {chosen[0].variable}", "quiet")
    return ExitCode.OK


def _init(
    call: Invocation,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")] = Path("dix.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> int:
    """Write a commented configuration file with every default.

      dix config init

    Next: edit it, then dix config show
    """
    if file.exists() and not force:
        raise ConfigError(f"{file} exists", hint="name another file, or --force")
    write_text(file, template())
    call.ui.note(f"wrote {file}")
    return ExitCode.OK


def _path(call: Invocation) -> int:
    """Print where configuration, state, cache and sockets live.

    Next: dix config show
    """
    from deepinfer_cli.ui import Column

    folders = {"config": call.paths.config, "state": call.paths.state, "cache": call.paths.cache, "runtime": call.paths.runtime}
    if call.json:
        call.ui.document("dix.paths/1", {name: str(path) for name, path in folders.items()})
    else:
        call.ui.table([Column("", right=False, role="accent"), Column("", right=False)], list(folders.items()))
    return ExitCode.OK


def template() -> str:
    """The text of `dix config init`: every setting, commented out, with its help, unit and range."""
    lines = ["# Settings of dix. Remove the # of a line to change it; flags and DIX_* variables win over this file."]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for setting in _settings_of(section):
            unit = f" Unit: {setting.knob.unit}." if setting.knob.unit else ""
            choices = f" One of: {', '.join(map(str, setting.knob.choices))}." if setting.knob.choices else ""
            lines += [f"# {setting.knob.help}{unit}{choices}", f"# {setting.name} = {_toml(setting.default)}"]
    return "\n".join(lines) + "\n"


def _settings_of(section: str | None) -> list[Setting]:
    if section is not None and section not in SECTIONS:
        raise ConfigError(f"{section} is not a section", hint=suggest(section, list(SECTIONS), "dix config list"))
    return [s for s in all_settings().values() if section in (None, s.section)]


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else '""'


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


show = command(_show)
list_ = command(_list)
init = command(_init)
path = command(_path)
TABLE = {
    "show": Lazy("deepinfer_cli.commands.config:show", "Show settings and where each came from."),
    "list": Lazy("deepinfer_cli.commands.config:list_", "List every setting there is."),
    "init": Lazy("deepinfer_cli.commands.config:init", "Write a commented configuration file."),
    "path": Lazy("deepinfer_cli.commands.config:path", "Print where files live."),
}
