"""The HTTP endpoint of a bootstrap node: health, metrics, and an error for all other requests."""

from __future__ import annotations

from typing import cast

from quart import Blueprint, Response, current_app, request

from swarmllm.api.http.app import App, alive, base_app, refusal
from swarmllm.api.http.json import encode
from swarmllm.config import Config
from swarmllm.errors import InvalidRequest
from swarmllm.keys import KeyRing
from swarmllm.node.bootstrap_node import BootstrapNode
from swarmllm.node.metrics import CONTENT_TYPE

NODE = "swarmllm.bootstrap_node"

bootstrap = Blueprint("bootstrap", __name__)
bootstrap.get("/health")(alive)


class NoModelsHere(InvalidRequest):
    """This is a bootstrap node; it answers no requests."""

    http_status = 404
    code = "bootstrap_node"


@bootstrap.get("/health/ready")
async def ready() -> Response:
    readiness = _node().readiness()
    body = {"status": readiness.status, "reason": readiness.reason}
    is_ready = readiness.status == "ready"
    return Response(encode(body), status=200 if is_ready else 503, content_type="application/json")


@bootstrap.get("/metrics")
async def metrics() -> Response:
    return Response(_node().metrics(), content_type=CONTENT_TYPE)


def _node() -> BootstrapNode:
    return cast(BootstrapNode, current_app.extensions[NODE])


def create_bootstrap_app(node: BootstrapNode, config: Config, keys: KeyRing | None = None) -> App:
    """`keys` None: nobody is asked for a key."""
    app = base_app(config, keys)
    app.extensions[NODE] = node
    app.register_blueprint(bootstrap)

    @app.errorhandler(404)
    async def elsewhere(error: Exception) -> Response:
        return refusal(
            NoModelsHere(
                f"{request.method} {request.path}: this is a bootstrap node. It has no models and answers "
                "/health, /health/ready and /metrics only; ask a node that runs `swarmllm daemon`."
            )
        )

    return app
