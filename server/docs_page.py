"""The OpenAPI document as a web page: every route with its body and answers. No scripts, and nothing loaded from other hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.55 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace}
pre{overflow-x:auto;padding:.6rem .8rem;border:1px solid #8884;border-radius:.4rem}
details{border-bottom:1px solid #8884;padding:.45rem 0}summary{cursor:pointer}summary b{display:inline-block;min-width:3.4rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem .8rem}dd{margin:0}
""".strip()


def docs_page(document: Mapping[str, Any]) -> str:
    """document: as `server.openapi.document` makes it. All of its text is shown as text."""
    title, about = escape(document["info"]["title"]), escape(document["info"]["description"])
    routes = "".join(
        _route(document, path, method, operation) for path, methods in document["paths"].items() for method, operation in methods.items()
    )
    schemas = "".join(_fold(f"<code>{escape(name)}</code>", _json(schema)) for name, schema in document["components"]["schemas"].items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="icon" href="data:,"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f'<p>{about} The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"<h2>Routes</h2>{routes}<h2>Schemas</h2>{schemas}</body></html>\n"
    )


def _route(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> str:
    head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
    body = operation.get("requestBody")
    parts = [f"<p>Body</p>{_json(body['content'])}"] if body is not None else []
    if operation.get("parameters"):
        parts.append(f"<p>Parameters</p>{_json(operation['parameters'])}")
    answers = "".join(f"<dt>{escape(s)}</dt><dd>{escape(_answer(document, a))}</dd>" for s, a in operation["responses"].items())
    return _fold(head, *parts, f"<p>Answers</p><dl>{answers}</dl>")


def _answer(document: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """What a status means, and what its body is."""
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    bodies = {media: content["schema"].get("$ref", "").rpartition("/")[2] for media, content in answer["content"].items()}
    return f"{answer['description']} {', '.join(f'{media} {name}'.rstrip() for media, name in bodies.items())}"


def _fold(head: str, *parts: str) -> str:
    return f"<details><summary>{head}</summary>{''.join(parts)}</details>"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"
