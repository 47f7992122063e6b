"""When code from a checkpoint may run: its hash is known or the operator trusts it, and its syntax tree is harmless."""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import typing
from pathlib import Path
from types import ModuleType

from engine.errors import CheckpointError
from engine.models import tiny_encoding

# The hash that public projects pin for revision dba1be0a40aa of DeepSeek-V4.1-Flash.
PUBLISHED_SHA256 = "502bdaec8a3fd88ebc24c4721a7038fbe42f2063c664638127056107920035c1"

_ALLOWED_IMPORTS = {"typing", "copy", "json", "re", "__future__"}
_FORBIDDEN_NAMES = {
    "open", "exec", "eval", "compile", "__import__", "input", "breakpoint", "__builtins__", "__loader__", "__spec__", "getattr", "setattr",
    "delattr", "vars", "globals", "locals",
}  # fmt: skip
# Ways to frames, to evaluation of strings, and to what an allowed module itself imports, such as typing.sys.
_FORBIDDEN_ATTRIBUTES = {
    "gi_frame", "cr_frame", "ag_frame", "tb_frame", "f_back", "f_globals", "f_locals", "f_builtins", "get_type_hints", "ForwardRef",
    "_evaluate", "evaluate_forward_ref",
    *(name for module in (copy, json, re, typing) for name, value in vars(module).items() if isinstance(value, ModuleType)),
}  # fmt: skip
_ALLOWED_DUNDERS = {"__name__", "__doc__", "__init__", "__class__"}
_FILE_READER = "load_cases"


def allowed_hashes() -> frozenset[str]:
    """SHA-256 of the encoders that need no `--trust-checkpoint-code`: our own and the published one."""
    own = hashlib.sha256(Path(tiny_encoding.__file__).read_bytes()).hexdigest()
    return frozenset({own, PUBLISHED_SHA256})


def load_code(path: Path, *, trust: bool) -> tuple[ModuleType, str]:
    """Run a file of the checkpoint as a private module. Returns (module, SHA-256).

    The module enters neither `sys.modules` nor `sys.path`, and no byte code is written.
    Raises:
        CheckpointError: unknown hash without trust, forbidden imports or calls, or code that fails to run.
    """
    source = path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    if not trust and digest not in allowed_hashes():
        raise CheckpointError(f"{path} is unknown code (SHA-256 {digest})", hint="read it, then start with --trust-checkpoint-code")
    try:
        tree = ast.parse(source, str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not Python: {error}", hint="download the file again") from error
    _refuse_unsafe(tree, path)
    module = ModuleType(f"_checkpoint_{digest[:16]}")
    module.__file__ = str(path)
    try:
        exec(compile(tree, str(path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise CheckpointError(f"{path} cannot be run: {type(error).__name__}: {error}", hint="download the file again") from error
    return module, digest


def _refuse_unsafe(tree: ast.Module, path: Path) -> None:
    for statement in tree.body:
        may_open = isinstance(statement, ast.FunctionDef) and statement.name == _FILE_READER
        plain = {id(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call) and _is_plain_getattr(node)}
        for node in ast.walk(statement):
            problem = "" if id(node) in plain else _problem(node, may_open)
            if problem:
                line = getattr(node, "lineno", 0)
                raise CheckpointError(
                    f"{path}:{line} {problem}", hint="an encoder only formats text; this file is refused even when trusted"
                )


def _problem(node: ast.AST, may_open: bool) -> str:
    if isinstance(node, ast.Import):
        foreign = [alias.name for alias in node.names if alias.name not in _ALLOWED_IMPORTS]
        return f"imports {foreign[0]}" if foreign else ""
    if isinstance(node, ast.ImportFrom):
        foreign = [alias.name for alias in node.names if alias.name in _FORBIDDEN_ATTRIBUTES]
        if node.level or node.module not in _ALLOWED_IMPORTS:
            return f"imports from {node.module or '.'}"
        return f"imports {node.module}.{foreign[0]}" if foreign else ""
    if isinstance(node, ast.Name) and node.id in _FORBIDDEN_NAMES and not (may_open and node.id == "open"):
        return f"uses {node.id}"
    if isinstance(node, ast.Attribute) and _leads_out(node.attr):
        return f"uses {node.attr}"
    return ""


def _leads_out(attribute: str) -> bool:
    hidden = attribute.startswith("__") and attribute.endswith("__") and attribute not in _ALLOWED_DUNDERS
    return hidden or attribute in _FORBIDDEN_ATTRIBUTES


def _is_plain_getattr(call: ast.Call) -> bool:
    """Whether it reads an attribute whose name stands there, and which may be read."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) >= 2):
        return False
    name = call.args[1]
    return isinstance(name, ast.Constant) and isinstance(name.value, str) and not _leads_out(name.value)
