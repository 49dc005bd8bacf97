"""/api/admin/shares: models that this node asks the others to hold parts of, and what it holds for others."""

from __future__ import annotations

from quart import Blueprint, Response

from swarmllm.api.admin.node_json import Json, range_texts
from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import read_body
from swarmllm.api.http.json import encode
from swarmllm.api.openai.schema import PlanPublished, ShareModel, SharePublished
from swarmllm.downloads.hub_search import FoundModel
from swarmllm.node import Node
from swarmllm.node.sharing.file_followers import HubAccess
from swarmllm.node.sharing.share_plan import SharePlan
from swarmllm.node.sharing.sharing import ShareView, no_room
from swarmllm_proto.architectures import ARCHITECTURES
from swarmllm_proto.identifiers import NodeId

shares = Blueprint("shares", __name__, url_prefix="/api/admin/shares")


@shares.get("")
async def all_of_them() -> Response:
    node = current_node()
    return _json({"shares": shares_json(node), "accepts": node.placing.accepts})


@shares.post("")
async def share() -> Response:
    body = await read_body(ShareModel)
    node = current_node()
    return _json(_share_json(node, await node.sharing.share(body.model, body.source)))


@shares.post("/published")
async def share_published() -> Response:
    """Of a model on the web, each node fetches the layers that it is going to hold."""
    body = await read_body(SharePublished)
    node = current_node()
    access = HubAccess(body.hf_token, body.hf_endpoint)
    return _json(_share_json(node, await node.file_shares.share(body.source, body.name, access)))


@shares.get("/<name>")
async def one(name: str) -> Response:
    node = current_node()
    return _json(_share_json(node, node.file_shares.view(name) or await node.sharing.view(name)))


@shares.get("/<name>/plan")
async def plan(name: str) -> Response:
    node = current_node()
    return _json(_plan_json(node, *(await node.sharing.plan(name))))


@shares.post("/plan")
async def plan_published() -> Response:
    """Of a model on the web, from its header: nothing else of it is fetched."""
    body = await read_body(PlanPublished)
    node = current_node()
    found = await node.downloads.published(body.source, token=body.hf_token, endpoint=body.hf_endpoint)
    spread = await node.file_shares.plan(found)
    planned = _plan_json(node, body.name or found.name, spread or await node.sharing.plan_of(found.layout))
    # The id covers the digests of all tensors, which nobody knows yet.
    del planned["model_id"]
    planned["cuts_known"] = found.layout.architecture in ARCHITECTURES
    planned["spread"] = spread is not None
    planned["download_bytes"] = found.file_bytes
    if spread is not None:
        own = [part.fetch_bytes for part in spread.parts if part.node_id == node.node_id]
        # How fast each node reaches its hub is not known.
        planned |= {"download_bytes": sum(own), "transfer_s": 0.0}
    return _json(planned)


@shares.delete("/<name>")
async def unshare(name: str) -> Response:
    node = current_node()
    ended = await node.file_shares.unshare(name)
    return _json(_share_json(node, ended or await node.sharing.unshare(name)))


def found_json(found: FoundModel, plan: SharePlan | None) -> Json:
    """One result of a search; `plan` None: of a model whose header is not known, or has no layers."""
    model: Json = {
        "repo": found.repo,
        "source": found.source,
        "files": found.files,
        "n_downloads": found.n_downloads,
        "name": "",
        "download_bytes": None,
        "size_bytes": None,
        "n_layers": None,
        "fits": None,
        "n_nodes": 0,
        "tokens_per_s": None,
        "problem": found.problem,
    }
    if found.published is None or plan is None:
        return model
    name, layout = found.published.name, found.published.layout
    model |= {
        "name": name,
        "download_bytes": found.published.file_bytes,
        "size_bytes": plan.size_bytes,
        "n_layers": layout.n_layers,
    }
    # Where an architecture can be cut that this node does not know is tried when the file is here.
    if layout.architecture not in ARCHITECTURES and not plan.is_complete:
        return model | {"problem": "where it can be cut is known when it is here"}
    return model | {
        "fits": plan.is_complete,
        "n_nodes": sum(bool(part.layers) for part in plan.parts),
        "tokens_per_s": plan.tokens_per_s,
        "problem": "" if plan.is_complete else no_room(name, plan),
    }


def shares_json(node: Node) -> list[Json]:
    return [_share_json(node, view) for view in (*node.file_shares.views(), *node.sharing.views())]


def _share_json(node: Node, view: ShareView) -> Json:
    return {
        "model": view.model,
        "model_id": view.model_id,
        "n_layers": view.n_layers,
        "n_ready": view.n_ready,
        "complete": view.complete,
        "own": any(share.model_id == view.model_id for share in node.placing.shares or ())
        or (not view.model_id and node.node_id in view.shared_by),
        "shared_by": [_node_json(node, node_id) for node_id in view.shared_by],
        "state": view.state,
        "problem": view.problem,
        "arrived_bytes": view.arrived_bytes,
        "total_bytes": view.total_bytes,
        "members": [
            _node_json(node, member.node_id)
            | {
                "layers": range_texts(member.ready),
                "loading": range_texts(member.loading),
                "arrived_bytes": member.arrived_bytes,
                "total_bytes": member.total_bytes,
            }
            for member in view.members
        ],
    }


def _plan_json(node: Node, model: str, plan: SharePlan) -> Json:
    return {
        "model": model,
        "model_id": plan.model_id,
        "size_bytes": plan.size_bytes,
        "complete": plan.is_complete,
        "problem": "" if plan.is_complete else no_room(model, plan),
        "parts": [
            _node_json(node, part.node_id)
            | {
                "layers": range_texts(part.layers),
                "size_bytes": part.n_bytes,
                "fetch_bytes": part.fetch_bytes,
                "room_bytes": part.room_bytes,
            }
            for part in plan.parts
        ],
        "tokens_per_s": plan.tokens_per_s,
        "transfer_s": plan.transfer_s,
        "transfer_measured": plan.is_transfer_measured,
        "refusing": [_node_json(node, node_id) for node_id in plan.refusing],
    }


def _node_json(node: Node, node_id: NodeId) -> Json:
    return {
        "node_id": node_id,
        "nickname": node.nickname_of(node_id),
        "is_self": node_id == node.node_id,
    }


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
