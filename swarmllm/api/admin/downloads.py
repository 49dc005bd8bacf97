"""/api/admin/downloads: models that come from the web, how far each is, retries, clearing."""

from __future__ import annotations

import dataclasses

from quart import Blueprint, Response

from swarmllm.api.admin.node_json import Json
from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import read_body
from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import StartDownload
from swarmllm.downloads import DownloadRequest, DownloadView
from swarmllm.errors import InvalidRequest
from swarmllm.models import CatalogueEntry
from swarmllm_proto.identifiers import PublishedName

downloads = Blueprint("downloads", __name__, url_prefix="/api/admin/downloads")


@downloads.get("")
async def all_of_them() -> Response:
    return _json({"downloads": [download_json(view) for view in current_node().downloads.list()]})


@downloads.post("")
async def start() -> Response:
    body = await read_body(StartDownload)
    node = current_node()
    if body.share and body.layers is not None:
        raise InvalidRequest("Only a whole model is shared out; leave layers out.", field="share")

    async def share(entry: CatalogueEntry, published: PublishedName) -> None:
        await node.sharing.share(entry.model_id, published)

    request = DownloadRequest(
        body.source,
        layers=body.layers,
        name=body.name,
        sha256=body.sha256 or "",
        token=body.hf_token,
        endpoint=body.hf_endpoint,
        mmproj=body.mmproj,
        then=share if body.share else None,
    )
    return _json(download_json(node.downloads.start(request).view()))


@downloads.get("/<id>")
async def one(id: str) -> Response:
    return _json(download_json(current_node().downloads.get(id).view()))


@downloads.delete("/<id>")
async def cancel(id: str) -> Response:
    download = current_node().downloads.get(id)
    download.scope.cancel()
    await download.ended.wait()
    return _json(download_json(download.view()))


@downloads.post("/<id>/retry")
async def retry(id: str) -> Response:
    return _json(download_json(current_node().downloads.retry(id).view()))


@downloads.post("/<id>/clear")
async def clear(id: str) -> Response:
    return _json(download_json(await current_node().downloads.clear(id)))


def download_json(view: DownloadView) -> Json:
    return dataclasses.asdict(view) | {"bytes_per_s": round(view.bytes_per_s)}


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
