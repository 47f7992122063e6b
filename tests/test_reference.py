"""`docs/reference.md` is written from the settings and the OpenAPI document. Write it anew with `python -m tests.test_reference`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepinfer_cli.settings import SECTIONS, all_settings
from server.openapi import FAILURE_NAMES, document

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
HEAD = """# Reference

Written by a program from the code; a test keeps it true. Every setting has a flag, a key in `dix.toml` and a variable
`DIX_<SECTION>_<KEY>`; a flag beats the variable, the variable beats the file. `dix config show` says what is in force and why.
"""
WHAT = {
    "engine": "one engine process",
    "hicache": "the host prefix cache",
    "server": "HTTP and supervision",
    "bench": "benchmarks",
    "ui": "the terminal",
}


def settings() -> list[str]:
    lines = []
    for section in SECTIONS:
        lines += [f"## Settings: {section}, {WHAT[section]}", "", "| key | flag | default | meaning |", "|---|---|---|---|"]
        for setting in all_settings().values():
            if setting.section == section:
                lines.append(f"| `{setting.name}` | {_flag(setting)} | {_code(setting.default)} | {_meaning(setting.knob)} |")
        lines.append("")
    return lines


def _flag(setting: Any) -> str:
    if setting.key == "engine.model":
        return "argument `MODEL`"
    return f"`--set {setting.key}=…`" if setting.section in ("bench", "ui") else f"`{setting.flag}`"


def _code(value: Any) -> str:
    text = {True: "on", False: "off", "": ""}.get(value, str(value)) if isinstance(value, (bool, str)) else str(value)
    return f"`{text}`" if text else "–"


def _meaning(knob: Any) -> str:
    choices = f" One of {', '.join(f'`{choice}`' for choice in knob.choices)}." if knob.choices else ""
    unit = f" In {knob.unit}." if knob.unit else ""
    return _cell(knob.help + unit + choices)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def http() -> list[str]:
    described = document("tiny", 1 << 17, 1 << 15, ["low", "high", "max"], render=True, faults=False)
    lines = [
        "## HTTP", "",
        "`--docs` serves the whole OpenAPI document at `/openapi.json` and as a page at `/docs`. `*` marks a required field.", "",
        "| request | what | body |", "|---|---|---|",
    ]  # fmt: skip
    for path, methods in described["paths"].items():
        for method, what in methods.items():
            lines.append(f"| `{method.upper()} {path}` | {_cell(what['summary'])} | {_body(what, described)} |")
    lines += ["", "| status | meaning |", "|---|---|", *(f"| {status} | {_cell(text)} |" for status, text in FAILURE_NAMES.items())]
    return lines


def _body(what: dict[str, Any], described: dict[str, Any]) -> str:
    contents = list(what.get("requestBody", {}).get("content", {}).values())
    if not contents:
        return ""
    schema = contents[0]["schema"]
    if "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    forms = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return " or ".join(_fields(form if "properties" in form else schema | form, described) for form in forms)


def _fields(schema: dict[str, Any], described: dict[str, Any]) -> str:
    if "$ref" in schema:
        schema = described["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    required = schema.get("required", ())
    return ", ".join(f"`{name}`{'*' if name in required else ''}" for name in schema.get("properties", ()))


def page() -> str:
    return "\n".join([HEAD, *settings(), *http()]) + "\n"


def test_the_reference_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.test_reference writes it anew"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
