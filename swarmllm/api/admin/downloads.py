"""/api/admin/downloads: models from the web. A download goes on without whoever asked for it."""

from __future__ import annotations

import dataclasses

from quart import Blueprint, Response

from swarmllm.api.admin.node_json import Json
from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import read_body
from swarmllm.api.openai.chat_reply import encode
from swarmllm.api.openai.schema import StartDownload
from swarmllm.downloads import DownloadView

downloads = Blueprint("downloads", __name__, url_prefix="/api/admin/downloads")


@downloads.get("")
async def all_of_them() -> Response:
    return _json({"downloads": [download_json(view) for view in current_node().downloads.list()]})


@downloads.post("")
async def start() -> Response:
    body = await read_body(StartDownload)
    download = current_node().downloads.start(
        body.source,
        layers=body.layers,
        name=body.name,
        sha256=body.sha256 or "",
        token=body.hf_token,
        endpoint=body.hf_endpoint,
    )
    return _json(download_json(download.view()))


@downloads.get("/<id>")
async def one(id: str) -> Response:
    return _json(download_json(current_node().downloads.get(id).view()))


@downloads.delete("/<id>")
async def cancel(id: str) -> Response:
    download = current_node().downloads.get(id)
    download.scope.cancel()
    await download.ended.wait()
    return _json(download_json(download.view()))


def download_json(view: DownloadView) -> Json:
    return dataclasses.asdict(view) | {"bytes_per_s": round(view.bytes_per_s)}


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
