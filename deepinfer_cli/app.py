"""The table of commands and the single error boundary."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import threading
import time
import traceback
from typing import Annotated, Any

import typer
from typer.main import get_command

from deepinfer_cli.exit_codes import ExitCode
from deepinfer_cli.lazy import CONTEXT, Lazy, LazyGroup
from hicache.errors import DixError, machine_error

HERE = "deepinfer_cli.commands"
COMMANDS = {
    "serve": Lazy(f"{HERE}.serve:serve", "Serve a model in the foreground."),
    "start": Lazy(f"{HERE}.start:start", "Serve a model in the background; returns when it is ready."),
    "stop": Lazy(f"{HERE}.stop:stop", "Stop a background server and everything it started."),
    "status": Lazy(f"{HERE}.status:status", "Show what is running."),
    "logs": Lazy(f"{HERE}.logs:logs", "Show a server's log."),
    "chat": Lazy(f"{HERE}.chat:chat", "Talk to a model."),
    "generate": Lazy(f"{HERE}.generate:generate", "Generate text offline, without a server."),
    "render": Lazy(f"{HERE}.render:render", "Show the exact prompt that a chat body becomes."),
    "check-cache": Lazy(f"{HERE}.check_cache:check_cache", "Prove on a live server that the prefix cache changes no token."),
    "cache": Lazy(f"{HERE}.cache:TABLE", "Look at the prefix cache of a live server.", group=True),
    "tune": Lazy(f"{HERE}.tune:TABLE", "Find the best value of a setting on a running server.", group=True),
    "bench": Lazy(f"{HERE}.bench:TABLE", "Measure a server and keep the run.", group=True),
    "report": Lazy(f"{HERE}.report:report", "Show, compare and export runs."),
    "model": Lazy(f"{HERE}.model:TABLE", "Make, inspect and verify model directories.", group=True),
    "config": Lazy(f"{HERE}.config:TABLE", "Show settings and where they come from.", group=True),
    "doctor": Lazy(f"{HERE}.doctor:doctor", "Check this machine and this installation."),
}


class Root(LazyGroup):
    """`dix` itself."""

    table = COMMANDS


app = typer.Typer(
    name="dix",
    cls=Root,
    add_completion=True,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
)


@app.callback()
def root(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> int:
    """Serve and measure the DeepSeek-V4.1 architecture: engine, OpenAI-compatible server, host prefix cache, benchmarks.

    Next: dix chat tiny, dix serve tiny, or dix bench run smoke
    """
    if version:
        print(f"dix {version_text()}")
        raise typer.Exit(ExitCode.OK)
    if context.invoked_subcommand is None:
        from deepinfer_cli.commands.overview import overview

        raise typer.Exit(overview())
    return ExitCode.OK


def version_text() -> str:
    from importlib.metadata import version

    return version("dix")


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code. Every failure is printed here and nowhere else."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["help"]:  # as many programs have it
        given = [*given[1:], "--help"]
    if threading.current_thread() is threading.main_thread():
        end_in_order()
    try:
        code = get_command(app).main(args=given, prog_name="dix", standalone_mode=False)
        sys.stdout.flush()  # what cannot be written is an error of this command, not of the interpreter's end
        return int(code or 0)
    except BrokenPipeError:
        from deepinfer_cli.ui import discard_stdout

        discard_stdout()
        return ExitCode.OK
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:
        return explain(error, given)


def end_in_order() -> None:
    """SIGTERM and a terminal that closes become exceptions: a server, a run, a changed setting is put in order first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays
            signal.signal(number, _end)


def _end(number: int, _frame: Any) -> None:
    if number == signal.SIGHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # kernel and shell both say so; the second one would cut the putting in order short
        with contextlib.suppress(OSError):
            _leave_terminal()
    raise SystemExit(ExitCode.HUNG_UP if number == signal.SIGHUP else ExitCode.TERMINATED)


def _leave_terminal() -> None:
    """What is printed from now on goes nowhere: a terminal that is gone fails every write, in the middle of the putting in order."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def explain(error: Exception, arguments: list[str]) -> int:
    """Print a failure as one line and a hint, or as one JSON document, and return its exit code."""
    hint = str(getattr(error, "hint", "") or "")
    code = getattr(error, "exit_code", None)
    if isinstance(error, DixError) or (code is not None and hasattr(error, "hint")):
        message = str(error)
    elif hasattr(error, "format_message"):
        message, hint, code = str(error.format_message()).rstrip("."), _usage_hint(error, arguments), ExitCode.USAGE
    elif (refusal := machine_error(error)) is not None:
        message, hint, code = str(refusal), refusal.hint, ExitCode.MACHINE
    else:
        message, hint, code = f"this is a bug: {type(error).__name__}: {error}", f"traceback: {_keep_traceback(error)}", ExitCode.BUG
    _print_failure(error, message, hint, int(code or ExitCode.BUG), arguments)
    return int(code or ExitCode.BUG)


def _print_failure(error: Exception, message: str, hint: str, code: int, arguments: list[str]) -> None:
    from deepinfer_cli.ui import Ui, UiOptions, discard_stdout

    color = False if "--no-color" in arguments or os.environ.get("NO_COLOR") else None
    ui = Ui(UiOptions(color=color), os.environ)
    try:
        if "--json" in arguments:
            ui.document("dix.error/1", {"code": code, "message": message, "hint": hint or None})
        sys.stdout.flush()
    except OSError:  # stdout may be what failed; the line below and the exit code remain
        discard_stdout()
    ui.error(message, hint)
    if any(a in ("-v", "-vv", "--verbose") for a in arguments):
        cause = error.__cause__ or error.__context__
        while cause is not None:
            ui.note(f"  because {type(cause).__name__}: {cause}", "quiet")
            cause = cause.__cause__ or cause.__context__


def _usage_hint(error: Any, arguments: list[str]) -> str:
    """Where to look, and what was probably meant: one dash before a long name, or a name before what stands alone."""
    from deepinfer_cli.options import SHARED

    context = getattr(error, "ctx", None)
    if context is None:
        return "dix --help"
    page = f"{context.command_path} --help"
    wrong = str(getattr(error, "option_name", ""))
    if context.parent is None and any(f"--{name.replace('_', '-')}" == wrong for name in SHARED):
        return f"it goes behind the command, as in: dix status {wrong}"
    options = {name for parameter in context.command.params for name in parameter.opts}
    for given in arguments:
        name = given.partition("=")[0]
        if len(name) > 2 and name.startswith(wrong) and f"-{name}" in options:
            return f"did you mean -{name}? {page}"
    for parameter in context.command.params:
        if parameter.param_type_name == "argument" and wrong == f"--{parameter.name}":
            return f"the {parameter.name} stands alone: {context.command_path} {parameter.name.upper()}"
    return page


def _keep_traceback(error: Exception) -> str:
    from deepinfer_cli.paths import paths_from

    folder = paths_from(os.environ).crashes
    text = "".join(traceback.format_exception(error))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        path.write_text(json.dumps({"argv": sys.argv}) + "\n" + text, encoding="utf-8")
    except OSError:
        sys.stderr.write(text)
        return "above (the state directory cannot be written)"
    return str(path)
