"""The web page at `/`, its files below `/web/`, and the page of all routes at `/docs`."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from archerfish.serve.calls import ADDRESS, EXAMPLES, curl, python
from archerfish.serve.openai_routes import ChatBody

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "json": "application/json",
}
# Nothing but the files of this server: no inline scripts and styles, no other hosts, and no frames around the page.
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}


class Asset(NamedTuple):
    """A file of the page."""

    media_type: str
    data: bytes
    etag: str

    @classmethod
    def of(cls, name: str, data: bytes) -> Asset:
        return cls(TYPES[name.rpartition(".")[2]], data, f'"{hashlib.sha256(data).hexdigest()[:20]}"')


@cache
def assets() -> dict[str, Asset]:
    """The files of the page by their names."""
    found = [file for file in (files("archerfish.serve") / "web").iterdir() if file.name.rpartition(".")[2] in TYPES]
    return {file.name: Asset.of(file.name, file.read_bytes()) for file in found}


@cache
def page_data(*, has_keys: bool) -> Asset:
    """What the page needs to know of the service: the parameters of a chat, and an example of each route."""
    calls = [
        {
            "kinds": kinds.split(),
            "method": method,
            "path": path,
            "python": python(method, path, body, has_keys=has_keys),
            "curl": curl(ADDRESS, method, path, body, has_keys=has_keys),
        }
        for kinds, method, path, body in EXAMPLES
    ]
    parameters = ChatBody.model_json_schema()["properties"]
    return Asset.of("data.json", json.dumps({"calls": calls, "parameters": parameters}, ensure_ascii=False).encode())


def asset_response(request: Request, asset: Asset) -> Response:
    """A file, or 304 for a browser that has it."""
    headers = {**PAGE_HEADERS, "ETag": asset.etag}
    if asset.media_type == TYPES["html"]:
        headers["Content-Security-Policy"] = CONTENT_POLICY
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.data, headers=headers, media_type=asset.media_type)


def docs_page(document: dict[str, Any]) -> str:
    """The page at `/docs` of an OpenAPI document."""
    shown = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            head = f"<code><b>{method.upper()}</b> {html.escape(path)}</code> {html.escape(operation['summary'])}"
            rows = "".join(parameter_rows(document, operation))
            table = f"<table>{rows}</table>"
            shown.append(f"<details><summary>{head}</summary>{table}</details>" if rows else f"<p>{head}</p>")
    template = Template(assets()["docs.html"].data.decode())
    return template.substitute(version=html.escape(document["info"]["version"]), routes="\n".join(shown))


def parameter_rows(document: dict[str, Any], operation: dict[str, Any]) -> Iterator[str]:
    """Table rows of the parameters of an operation's body: name, type and description."""
    stated = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = document["components"]["schemas"].get(stated.get("$ref", "").rpartition("/")[2], stated)
    for name, member in schema.get("properties", {}).items():
        is_needed = name in schema.get("required", ())
        title = f"<b>{html.escape(name)}</b>" if is_needed else html.escape(name)
        cells = (f"<code>{title}</code>", type_of(member), html.escape(member.get("description", "")))
        yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def type_of(schema: dict[str, Any]) -> str:
    """The type of a value in words, without null, which stands for a parameter that is left out."""
    inner = [type_of(one) for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    kind = "object" if "$ref" in schema else "any of a list" if "enum" in schema else schema.get("type", "any")
    return " or ".join(dict.fromkeys(inner)) if inner else html.escape(str(kind))
