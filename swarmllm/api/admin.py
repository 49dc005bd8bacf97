"""/api/admin: what `swarmllm status`, `peers` and `models` ask of a running node."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import trio
from quart import Blueprint, Response, request

from swarmllm import __version__
from swarmllm.api.chat_reply import encode
from swarmllm.api.connection import own_feed
from swarmllm.api.context import current_config, current_node
from swarmllm.api.errors import error_object, read_body
from swarmllm.api.plan_report import plan_report, read_size
from swarmllm.api.schema import AddModel, ModelLayers, PinModel
from swarmllm.api.work import Work
from swarmllm.config import as_dict
from swarmllm.errors import InvalidRequest
from swarmllm.models import LayerRange
from swarmllm.node import ModelView, PeerView
from swarmllm.workerpool import WorkerStatistics
from swarmllm_proto.swarm import FileAnnounce

Json = dict[str, object]

admin = Blueprint("admin", __name__, url_prefix="/api/admin")


@admin.get("/stats")
async def stats() -> Response:
    node = current_node()
    counts, admission = node.counts, node.admission
    loaded = [
        {"name": view.name, "model_id": view.model_id, "layers": _texts(view.loaded)}
        for view in await node.models()
        if view.loaded
    ]
    return _json(
        {
            "node_id": node.node_id,
            "nickname": node.nickname,
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - node.started_at, 3),
            "ready": node.readiness().status == "ready",
            "addresses": node.addresses,
            "peers_connected": len(node.peers()),
            "requests": {
                "active": admission.n_active,
                "queued": admission.n_queued,
                "max": admission.max_running,
                "completed": counts.completed,
                "failed": counts.failed,
                "cancelled": counts.cancelled,
            },
            "generated_tokens": counts.generated_tokens,
            "models": loaded,
            "pipelines": node.pipeline_statistics(),
            "travel": node.travel_statistics(),
            "workers": [_worker(worker) for worker in node.worker_statistics()],
        }
    )


@admin.get("/peers")
async def peers() -> Response:
    return _json({"peers": [_peer(view) for view in current_node().peers()]})


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
    return _json({"models": [_model(view) for view in await current_node().models()]})


@admin.post("/models")
async def add() -> Response:
    body = await read_body(AddModel)
    if not body.path.startswith("/"):
        raise InvalidRequest("path must be absolute: the daemon runs in a folder of its own.", field="path")
    node = current_node()
    return _progress(
        Work(lambda report: node.add_model(Path(body.path), body.name, report), from_thread=True)
    )


@admin.get("/models/<name>/status")
async def status(name: str) -> Response:
    return _json(_model(await current_node().model(name)))


@admin.post("/models/<name>/load")
async def load(name: str) -> Response:
    body = await read_body(ModelLayers, optional=True)
    node = current_node()
    entry, layers = await node.resolve(name, body.layers)
    return _progress(
        Work(
            lambda report: node.load(
                entry, layers, partial(report, phase="loading"), partial(report, phase="fetching")
            )
        )
    )


@admin.post("/models/<name>/unload")
async def unload(name: str) -> Response:
    body = await read_body(ModelLayers, optional=True)
    return _json(_model(await current_node().unload(name, body.layers)))


@admin.post("/models/<name>/verify")
async def verify(name: str) -> Response:
    node = current_node()
    await node.model(name)
    return _progress(Work(lambda report: node.verify(name, report), from_thread=True))


@admin.post("/models/<name>/pin")
async def pin(name: str) -> Response:
    body = await read_body(PinModel, optional=True)
    return _json(_model(await current_node().pin(name, body.pinned)))


@admin.delete("/models/<name>")
async def remove(name: str) -> Response:
    return _json(_model(await current_node().remove(name)))


def _progress(work: Work[Any]) -> Response:
    own_feed(work)
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
        yield _line({"type": "result", "model": _model(work.result)})
    elif work.result is not None:
        view, damaged = work.result
        yield _line({"type": "result", "model": _model(view), "damaged": damaged})


def _line(fields: Json) -> bytes:
    return encode(fields) + b"\n"


def _model(view: ModelView) -> Json:
    entry = view.entry
    manifest = entry.manifest if entry else None
    holders = [
        {
            "node_id": holder.node_id,
            "nickname": holder.nickname,
            "layers": _texts(holder.layers),
            "is_self": holder.is_self,
        }
        for holder in view.holders
    ]
    return {
        "name": view.name,
        "model_id": view.model_id,
        "path": str(entry.path) if entry else None,
        "architecture": manifest.architecture if manifest else None,
        "n_layers": view.n_layers,
        "context_length": manifest.context_length if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "cut_alignment": manifest.cut_alignment if manifest else None,
        "whole_reason": manifest.whole_reason if manifest else None,
        "stored": entry.is_stored if entry else False,
        "pinned": entry.pinned if entry else False,
        "files": _files(view.files) if view.files else None,
        "sources": view.sources,
        "loaded": _texts(view.loaded),
        "holders": holders,
        "complete": view.complete,
        "missing": _texts(view.missing),
    }


def _files(files: FileAnnounce) -> Json:
    return {
        "layers": [f"{start}:{end}" for start, end in files.layers],
        "embedding": files.embedding,
        "head": files.head,
    }


def _peer(view: PeerView) -> Json:
    info, record = view.info, view.record
    announced = record.models if record else ()
    return {
        "node_id": info.node_id,
        "nickname": record.nickname if record else "",
        "software": record.software if record else "",
        "addresses": info.addresses,
        "rtt_ms": None if info.rtt_s is None else round(info.rtt_s * 1000, 3),
        "data_plane": info.data_plane,
        "bytes_sent": info.bytes_sent,
        "bytes_received": info.bytes_received,
        "connected_s": round(trio.current_time() - info.connected_since, 3),
        "models": [
            {
                "name": model.name,
                "model_id": model.model_id,
                "layers": [f"{start}:{end}" for start, end in model.ranges],
            }
            for model in announced
        ],
        "files": [
            {"name": files.name, "model_id": files.model_id} | _files(files)
            for files in (record.files if record else ())
        ],
    }


def _worker(worker: WorkerStatistics) -> Json:
    return dataclasses.asdict(worker) | {"loaded": _texts(worker.loaded)}


def _texts(ranges: tuple[LayerRange, ...]) -> list[str]:
    return [str(layers) for layers in ranges]


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
