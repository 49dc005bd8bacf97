"""GET /health (the process answers), /health/ready (what it was told to load, by its configuration
or by hand before it ended, is loaded), /metrics."""

from __future__ import annotations

from quart import Blueprint, Response

from swarmllm.api.http.context import current_node
from swarmllm.api.openai.chat_reply import encode
from swarmllm.node.metrics import CONTENT_TYPE

health = Blueprint("health", __name__)


@health.get("/health")
async def alive() -> Response:
    return Response(encode({"status": "ok"}), content_type="application/json")


@health.get("/health/ready")
async def ready() -> Response:
    readiness = current_node().readiness()
    body = {"status": readiness.status, "reason": readiness.reason}
    status = 200 if readiness.status == "ready" else 503
    return Response(encode(body), status=status, content_type="application/json")


@health.get("/metrics")
async def metrics() -> Response:
    return Response(current_node().metrics.text(), content_type=CONTENT_TYPE)
