"""/api/admin: what `swarmllm status`, `peers` and `models` ask of a running node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from quart import Blueprint, Response, request

from swarmllm.api.admin.node_json import Json, model_json, peer_json, stats_json
from swarmllm.api.admin.peer_report import details_report
from swarmllm.api.admin.plan_report import plan_report, read_size
from swarmllm.api.admin.progress import Work
from swarmllm.api.http.context import current_config, current_node, current_works
from swarmllm.api.http.errors import error_object, read_body
from swarmllm.api.http.request_tasks import own_feed
from swarmllm.api.http.sliced_json import encoded
from swarmllm.api.openai.chat_reply import encode
from swarmllm.api.openai.schema import AddModel, AliasModel, LoadModel, PinModel, UnloadModel
from swarmllm.config import as_dict
from swarmllm.errors import InvalidRequest
from swarmllm.models.presets import Preset
from swarmllm.node import ModelView
from swarmllm.workerpool import LoadOptions

admin = Blueprint("admin", __name__, url_prefix="/api/admin")


@admin.get("/stats")
async def stats() -> Response:
    node = current_node()
    return _json(stats_json(node, await node.models.own()))


@admin.get("/peers")
async def peers() -> Response:
    return _json({"peers": await encoded(current_node().peers(), peer_json)})


@admin.get("/peers/<node>")
async def peer(node: str) -> Response:
    return _json(details_report(current_node().peer_lookup.show(node)))


@admin.get("/plan")
async def plan() -> Response:
    model, size = read_size(request.args)
    node = current_node()
    name, planned = await node.plan(model, size)
    return _json(plan_report(name, size, planned, node.nickname_of))


@admin.get("/config")
async def config() -> Response:
    return _json({"config": as_dict(current_config())})


@admin.get("/models")
async def models() -> Response:
    kept = current_node().models
    return _json({"models": await encoded(await kept.list(), model_json), "left_out": kept.n_left_out()})


@admin.post("/models")
async def add() -> Response:
    body = await read_body(AddModel)
    if not body.path.startswith("/"):
        raise InvalidRequest("path must be absolute: the daemon runs in a folder of its own.", field="path")
    node = current_node()
    return _progress(
        Work(
            lambda report: node.models.add(
                Path(body.path), body.name, report, partial(report, phase="checking")
            ),
            kind="add",
            subject=body.name or Path(body.path).name,
            from_thread=True,
        )
    )


@admin.get("/models/<name>/status")
async def status(name: str) -> Response:
    return _json(model_json(await current_node().models.get(name)))


@admin.post("/models/<name>/load")
async def load(name: str) -> Response:
    body = await read_body(LoadModel, optional=True)
    node = current_node()
    entry, layers = await node.models.resolve(name, body.layers)
    options = LoadOptions(**{field.name: getattr(body, field.name) for field in fields(LoadOptions)})
    if options.n_ctx is None:
        options = replace(options, n_ctx=(await node.models.presets.get(name)).context)
    return _progress(
        Work(
            lambda report: node.models.load(
                entry, layers, partial(report, phase="loading"), partial(report, phase="fetching"), options
            ),
            kind="load",
            subject=entry.name,
        )
    )


@admin.post("/models/<name>/unload")
async def unload(name: str) -> Response:
    body = await read_body(UnloadModel, optional=True)
    models = current_node().models
    entry, layers = await models.loaded(name, body.layers)
    if not body.progress:
        return _json(model_json(await models.unload(entry, layers)))
    return _progress(
        Work(lambda report: models.unload(entry, layers, report), kind="unload", subject=entry.name)
    )


@admin.post("/models/<name>/verify")
async def verify(name: str) -> Response:
    node = current_node()
    view = await node.models.get(name)
    return _progress(
        Work(
            lambda report: node.models.verify(name, report),
            kind="verify",
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


def _progress(work: Work[Any]) -> Response:
    current_works().add(own_feed(work))
    response = Response(_lines(work), content_type="application/x-ndjson")
    response.timeout = None
    return response


async def _lines(work: Work[Any]) -> AsyncIterator[bytes]:
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


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
