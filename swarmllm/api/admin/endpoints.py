"""/api/admin, which the command line asks, and the files of the dashboard.

The files say nothing about the node, so they are served without a key, as the form that asks for one has to
be. What they show comes from /api/events and the other endpoints, where the rules hold as for everybody.

The content security policy lets a page run and load only these files: a name that another node chose can
not become a script, whatever mistake is made here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import trio
from quart import Blueprint, Response, abort, request

from swarmllm.api.admin.downloads import download_json
from swarmllm.api.admin.node_json import (
    HOLDERS_SHOWN,
    Json,
    departed_json,
    details_report,
    loading_json,
    model_json,
    peer_json,
    plan_report,
    read_size,
    stats_json,
)
from swarmllm.api.admin.progress import ProgressStream, Report
from swarmllm.api.admin.shares import found_json, shares_json
from swarmllm.api.http.context import current_caller, current_config, current_node, current_progress_streams
from swarmllm.api.http.errors import Forbidden, error_object, read_body
from swarmllm.api.http.json import encode, encoded
from swarmllm.api.http.request_tasks import start_request_task
from swarmllm.api.openai.schema import (
    AddModel,
    AliasModel,
    AttachProjector,
    LoadModel,
    MakeInvitation,
    PinModel,
    SearchModels,
    UnloadModel,
)
from swarmllm.config import as_dict
from swarmllm.downloads.download import ENDED
from swarmllm.downloads.hub_search import FoundModel
from swarmllm.errors import BadModel, InvalidRequest
from swarmllm.models.manifest import MMPROJ_INDEX
from swarmllm.models.presets import Preset
from swarmllm.node import ModelView, Node
from swarmllm.node.projectors import WantedShards
from swarmllm.node.sharing.share_plan import SharePlan
from swarmllm.swarm.membership.invitation import invitation, join_command, outward, to_text
from swarmllm.swarm.membership.network_key import Network, NetworkFile
from swarmllm.workerpool import LoadOptions

DAY_S = 86_400.0
FOLDER = Path(__file__).parent / "dashboard"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
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


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")


admin = Blueprint("admin", __name__, url_prefix="/api/admin")


@admin.get("/stats")
async def stats() -> Response:
    node = current_node()
    under_way = [download_json(view) for view in node.downloads.list() if view.state not in ENDED]
    body = stats_json(node, await node.models.own())
    loading = loading_json(node)
    return _json(body | {"downloads": under_way, "shares": shares_json(node), "loading": loading})


@admin.get("/peers")
async def peers() -> Response:
    node = current_node()
    left = [departed_json(each) for each in node.peer_lookup.departed()]
    return _json({"peers": await encoded(node.peers(), peer_json), "left": left})


@admin.get("/peers/<node>")
async def peer(node: str) -> Response:
    return _json(details_report(current_node().peer_lookup.show(node)))


@admin.get("/plan")
async def plan() -> Response:
    model, size = read_size(request.args)
    node = current_node()
    name, planned = await node.plan(model, size)
    view = await node.models.get(name)
    has_own = view.entry is not None and view.entry.projector is not None
    encoders = [] if has_own else view.encoders[:HOLDERS_SHOWN]
    takes = {
        "takes_pictures": view.takes_pictures,
        "takes_sounds": view.takes_sounds,
        "encoders": [
            {"node_id": each, "nickname": node.nickname_of(each), "shard": MMPROJ_INDEX} for each in encoders
        ],
    }
    return _json(plan_report(name, size, planned, node.nickname_of) | takes)


@admin.get("/config")
async def config() -> Response:
    return _json({"config": as_dict(current_config())})


@admin.get("/join")
async def join() -> Response:
    """How another machine joins; nothing here is secret."""
    addresses, network = current_node().addresses, await _network()
    return _json(
        {
            "private": network.is_private,
            "reachable": bool(outward(addresses)),
            "command": join_command(network, addresses),
        }
    )


@admin.post("/invitations")
async def invite() -> Response:
    """The key of a private swarm goes only to callers that have shown an admin key: not to every program of
    this machine."""
    body = await read_body(MakeInvitation, optional=True)
    addresses, network = current_node().addresses, await _network()
    if network.is_private and not current_caller().key_id:
        raise Forbidden(
            "This swarm is private, and this node asks for no API key, so any program of this machine could"
            " ask for the swarm's key. Run `swarmllm invite` on this machine instead, or make an API key:"
            " swarmllm key create NAME --admin"
        )
    expires_at = time.time() + body.expires_days * DAY_S
    text = to_text(invitation(network, outward(addresses) or addresses, expires_at))
    response = _json({"command": f"swarmllm join {text}", "invitation": text, "expires_at": expires_at})
    response.headers["Cache-Control"] = "no-store"
    return response


async def _network() -> Network:
    return await trio.to_thread.run_sync(NetworkFile(current_config().data_dir).read)


@admin.get("/models")
async def models() -> Response:
    node = current_node()
    views = await encoded(await node.models.list(), model_json)
    copies = await trio.to_thread.run_sync(node.copies.view)
    body = {"models": views, "left_out": node.models.n_left_out(), "copies": dataclasses.asdict(copies)}
    return _json(body)


@admin.post("/models")
async def add() -> Response:
    body = await read_body(AddModel)
    if not body.path.startswith("/"):
        raise InvalidRequest("path must be absolute: the daemon runs in a folder of its own.", field="path")
    if body.mmproj is not None and not body.mmproj.startswith("/"):
        raise InvalidRequest(
            "mmproj must be absolute: the daemon runs in a folder of its own.", field="mmproj"
        )
    mmproj = None if body.mmproj is None else Path(body.mmproj)
    node = current_node()
    return _progress(
        ProgressStream(
            lambda report: node.models.add(
                Path(body.path), body.name, report, partial(report, phase="checking"), mmproj
            ),
            kind="add",
            subject=body.name or Path(body.path).name,
            from_thread=True,
        )
    )


@admin.post("/models/search")
async def search() -> Response:
    """On the hub, from the headers of what it finds: nothing else is fetched."""
    body = await read_body(SearchModels)
    node = current_node()
    found = await node.downloads.search(body.term, token=body.hf_token, endpoint=body.hf_endpoint)
    return _json({"models": [found_json(*(await _planned(node, each))) for each in found]})


async def _planned(node: Node, found: FoundModel) -> tuple[FoundModel, SharePlan | None]:
    if found.published is None:
        return found, None
    try:
        return found, await node.sharing.plan_of(found.published.layout)
    except BadModel as error:
        return replace(found, published=None, problem=error.message), None


@admin.get("/models/<name>/status")
async def status(name: str) -> Response:
    return _json(model_json(await current_node().models.get(name)))


@admin.post("/models/<name>/load")
async def load(name: str) -> Response:
    body = await read_body(LoadModel, optional=True)
    node = current_node()
    wanted = WantedShards.parse(body.layers)
    if not wanted.has_layers:
        return _progress(
            ProgressStream(
                lambda report: node.models.load_projector(name, partial(report, phase="fetching")),
                kind="load",
                subject=name,
            )
        )
    entry, layers = await node.models.resolve(name, wanted.layers)
    options = LoadOptions(**{field.name: getattr(body, field.name) for field in fields(LoadOptions)})
    if options.n_ctx is None:
        options = replace(options, n_ctx=(await node.models.presets.get(name)).context)

    async def act(report: Report) -> ModelView:
        fetching = partial(report, phase="fetching")
        view = await node.models.load(entry, layers, partial(report, phase="loading"), fetching, options)
        if wanted.has_projector:
            view = await node.models.load_projector(entry.model_id, fetching)
        return view

    return _progress(ProgressStream(act, kind="load", subject=entry.name))


@admin.post("/models/<name>/unload")
async def unload(name: str) -> Response:
    body = await read_body(UnloadModel, optional=True)
    models = current_node().models
    wanted = WantedShards.parse(body.layers)
    entry, layers = await models.loaded(name, wanted.layers)

    async def act(report: Report | None = None) -> ModelView:
        if not wanted.has_layers:
            return await models.unload_projector(entry.model_id)
        if wanted.has_projector:
            return await models.unload_all(entry, report)
        return await models.unload(entry, layers, report)

    if not body.progress:
        return _json(model_json(await act()))
    return _progress(ProgressStream(act, kind="unload", subject=entry.name))


@admin.post("/models/<name>/verify")
async def verify(name: str) -> Response:
    node = current_node()
    view = await node.models.get(name)
    return _progress(
        ProgressStream(
            lambda report: node.models.verify(name, report),
            kind="verify",
            subject=view.name,
            from_thread=True,
        )
    )


@admin.post("/models/<name>/projector")
async def attach_projector(name: str) -> Response:
    body = await read_body(AttachProjector)
    if not body.path.startswith("/"):
        raise InvalidRequest("path must be absolute: the daemon runs in a folder of its own.", field="path")
    node = current_node()
    view = await node.models.get(name)
    return _progress(
        ProgressStream(
            lambda report: node.models.attach(name, Path(body.path), report),
            kind="add",
            subject=view.name,
            from_thread=True,
        )
    )


@admin.post("/models/<name>/pin")
async def pin(name: str) -> Response:
    body = await read_body(PinModel, optional=True)
    return _json(model_json(await current_node().models.pin(name, body.pinned)))


@admin.post("/models/<name>/alias")
async def alias(name: str) -> Response:
    body = await read_body(AliasModel)
    return _json(model_json(await current_node().models.alias(name, body.name)))


@admin.get("/models/<name>/preset")
async def preset(name: str) -> Response:
    await current_node().models.get(name)
    return _json(await current_node().models.presets.get(name))


@admin.post("/models/<name>/preset")
async def set_preset(name: str) -> Response:
    """In place of the one that is there; an empty one removes it."""
    body = await read_body(Preset)
    await current_node().models.presets.put(name, body)
    return _json(body)


@admin.delete("/models/<name>")
async def remove(name: str) -> Response:
    return _json(model_json(await current_node().models.remove(name)))


def _progress(work: ProgressStream[Any]) -> Response:
    current_progress_streams().add(start_request_task(work))
    response = Response(_lines(work), content_type="application/x-ndjson")
    response.timeout = None
    return response


async def _lines(work: ProgressStream[Any]) -> AsyncIterator[bytes]:
    async for done_bytes, total_bytes, phase in work:
        progress: Json = {"type": "progress", "done_bytes": done_bytes, "total_bytes": total_bytes}
        yield _line(progress | ({"phase": phase} if phase else {}))
    if work.error is not None:
        yield _line({"type": "error", "error": error_object(work.error)})
    elif isinstance(work.result, ModelView):
        yield _line({"type": "result", "model": model_json(work.result)})
    elif work.result is not None:
        view, damaged = work.result
        yield _line({"type": "result", "model": model_json(view), "damaged": damaged})


def _line(fields: Json) -> bytes:
    return encode(fields) + b"\n"
