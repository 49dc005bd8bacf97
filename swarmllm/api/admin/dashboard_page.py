"""The page at `/`: HTML, CSS and JavaScript as they lie here, nothing built, nothing from elsewhere.

The files say nothing about the node, so they are served without a key, as the form that asks for one has to
be. What they show comes from /api/events and the other endpoints, where the rules hold as for everybody.

The content security policy lets a page run and load only these files: a name that another node chose can
not become a script, whatever mistake is made here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from quart import Blueprint, Response, abort, request

FOLDER = Path(__file__).parent / "dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = "index.html"
PAGE_PATH = "/"
FILES_PREFIX = "/dashboard/"

dashboard = Blueprint("dashboard", __name__)


@dataclass(frozen=True, slots=True)
class Asset:
    content_type: str
    data: bytes
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """Every file, read once: what is not here is not served, whatever its path says."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        data = path.read_bytes()
        found[path.name] = Asset(TYPES[path.suffix], data, hashlib.sha256(data).hexdigest()[:16])
    return found


@dashboard.get(PAGE_PATH)
async def page() -> Response:
    return _answer(PAGE)


@dashboard.get(f"{FILES_PREFIX}<file>")
async def asset(file: str) -> Response:
    return _answer(file)


def _answer(name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        abort(404)
    response = Response(asset.data, content_type=asset.content_type)
    response.set_etag(asset.tag)
    response.headers["Cache-Control"] = "no-cache"
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["Referrer-Policy"] = "no-referrer"
    if asset.tag in request.if_none_match:
        response.status_code = 304
        response.set_data(b"")
    return response
