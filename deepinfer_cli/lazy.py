"""Groups whose commands are named by import string, so that `dix --help` imports none of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from hicache.errors import ConfigError

CONTEXT = {"help_option_names": ["-h", "--help"]}


@dataclass(frozen=True, slots=True)
class Lazy:
    """Where a command lives (`module:attribute`), its one line in the list, and whether the attribute is a group's table."""

    target: str
    summary: str
    group: bool = False


class LazyGroup(TyperGroup):
    """A group that imports a command only to run it or to show its own help."""

    table: dict[str, Lazy] = {}  # noqa: RUF012  (each subclass brings its own)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        module, _, attribute = entry.target.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if entry.group:
            built: Any = get_command(group_app(cmd_name, entry.summary, found))
        else:
            built = without_argument_types(get_command(command_app(found)))
        built.name = cmd_name
        return built

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises: ConfigError with the nearest name for a command that does not exist."""
        name = args[0]
        if name not in self.table and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, self.table, n=1)
            meant = near[0] if near else f"run {name}" if "run" in self.table else ""
            guess = f"did you mean {ctx.command_path} {meant}? " if meant else ""
            raise ConfigError(f"there is no command {ctx.command_path} {name}", hint=f"{guess}all commands: {ctx.command_path} --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in self.table.items()])


def command_app(function: Any) -> typer.Typer:
    """An app of one command; its help text is the function's docstring."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=CONTEXT, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT)(function)
    return app


def without_argument_types(command: Any) -> Any:
    """Its help names arguments as the usage line does. Typer would add their Python types, such as <list[str]>."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: ""
    return command


def group_app(name: str, summary: str, table: dict[str, Lazy]) -> typer.Typer:
    """An app that lists `table` and runs what is named."""
    kind = type(f"Lazy{name.title()}Group", (LazyGroup,), {"table": table})
    app = typer.Typer(name=name, cls=kind, help=summary, add_completion=False, rich_markup_mode=None, context_settings=CONTEXT)

    @app.callback()
    def start() -> None:
        """Hold the group together; the commands do the work."""

    # The line in the list is also the head of the group's own help.
    start.__doc__ = summary
    return app
