"""From a function to a command: shared options, one flag per setting, and the call with an `Invocation`.

A command is a plain function `run(call: Invocation, ...) -> int`. `command(...)` gives it a signature that Typer understands:
its own parameters, then the flags of the settings it uses (common ones in `--help`, the rest hidden but working), then the shared ones.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from deepinfer_cli.invocation import Shared, prepare
from deepinfer_cli.settings import Setting, all_settings, convert

SHARED: dict[str, tuple[Any, Any, Any]] = {
    "config": (Path | None, typer.Option("--config", metavar="FILE", help="Read this file instead of the nearest dix.toml."), None),
    "set": (list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set any setting; may be repeated."), ()),
    "json": (bool, typer.Option("--json", help="Print one JSON document (streams: JSON Lines)."), False),
    "quiet": (bool, typer.Option("--quiet", "-q", help="Print errors only."), False),
    "verbose": (int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; twice for debug."), 0),
    "no_color": (bool, typer.Option("--no-color", help="Print without colour."), False),
    "no_progress": (bool, typer.Option("--no-progress", help="Draw no bars."), False),
}
# Of several commands, not of all.
Port = Annotated[int | None, typer.Option("--port", metavar="P", help="Port on this machine.  [default: the running server's]")]
Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="Server somewhere else.")]
AnyUrl = Annotated[str | None, typer.Option("--url", metavar="URL", help="Any OpenAI-compatible server.")]
Label = Annotated[list[str] | None, typer.Option("--label", metavar="K=V", help="Remember this with the run; may be repeated.")]


def command(
    function: Callable[..., int],
    *,
    sections: tuple[str, ...] = (),
    defaults: Mapping[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Callable[..., int]:
    """The function with the signature Typer sees. `leave_out` names settings that the command sets itself."""
    defaults = defaults or {}
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    settings = {
        f"knob_{s.section}_{s.name}": s
        for s in all_settings().values()
        if s.section in sections and s.key not in leave_out and s.flag.lstrip("-").replace("-", "_") not in {p.name for p in own}
    }

    @functools.wraps(function)
    def wrapper(**given: Any) -> int:
        shared_given: dict[str, Any] = {name: given.pop(name) for name in SHARED}
        shared = Shared(**shared_given | {"set": tuple(shared_given["set"])})
        flags = {s.key: given.pop(name) for name, s in settings.items()}
        flags = {key: convert(all_settings()[key], value, all_settings()[key].flag) for key, value in flags.items() if value is not None}
        call = prepare(shared, flags, defaults)
        try:
            return function(call, **given)
        finally:
            call.ui.finish()

    parameters = [*own]
    parameters += [_setting_parameter(name, s, defaults.get(s.key, s.default)) for name, s in settings.items()]
    parameters += [_parameter(name, hint, option, default) for name, (hint, option, default) in SHARED.items()]
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    target: Any = wrapper
    target.__signature__ = inspect.Signature(keyword, return_annotation=int)
    target.__annotations__ = {p.name: p.annotation for p in keyword} | {"return": int}
    target.__doc__ = keep_examples(function.__doc__ or "")
    del target.__wrapped__
    return wrapper


def keep_examples(docstring: str) -> str:
    """The help text with a mark before each indented paragraph, so that its lines are not wrapped into one."""
    paragraphs = inspect.cleandoc(docstring).replace("\nNext:", "\n\nNext:").split("\n\n")
    return "\n\n".join(f"\b\n{p}" if p.startswith("  ") else p for p in paragraphs)


def _parameter(name: str, hint: Any, option: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])


def _setting_parameter(name: str, setting: Setting, default: Any) -> inspect.Parameter:
    """An option without a default of its own, so that a flag which was given can be told from one which was not."""
    text = f"{setting.knob.help}{_shown(default)}"
    # Only spellings that exist elsewhere get a second name: a time in seconds keeps its mechanical flag as well.
    names = [setting.flag] + ([f"--{setting.name.replace('_', '-')}"] if setting.knob.unit == "s" else [])
    if setting.types == (bool,):
        names = [f"{setting.flag}/--no-{setting.flag[2:]}"]
        option = typer.Option(*names, help=text, hidden=not setting.knob.common, show_default=False)
        return _parameter(name, bool | None, option, None)
    metavar = "|".join(map(str, setting.knob.choices)) or _metavar(setting)
    option = typer.Option(*names, help=text, metavar=metavar, hidden=not setting.knob.common, show_default=False)
    return _parameter(name, typing.Optional[str], option, None)  # noqa: UP045  (Typer reads the runtime object)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"  [default: {default}]" if default != "" else ""


def _metavar(setting: Setting) -> str:
    if setting.knob.unit == "s":
        return "TIME"
    if setting.knob.unit in ("GiB", "bytes"):
        return setting.knob.unit.upper() if setting.knob.unit == "bytes" else "GIB"
    return "N" if int in setting.types or float in setting.types else "TEXT"
