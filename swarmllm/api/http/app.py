"""The application: blueprints, health, the checks before every request, the shape of every error."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, Response, g, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from swarmllm.api.admin.downloads import downloads
from swarmllm.api.admin.endpoints import admin, dashboard
from swarmllm.api.admin.events import NODE_SECTIONS, NodeSections, events
from swarmllm.api.admin.progress import ProgressStreams
from swarmllm.api.admin.shares import shares
from swarmllm.api.anthropic.messages import anthropic
from swarmllm.api.http.auth import (
    Authenticator,
    Origins,
    Unauthorized,
    check_admin_type,
    check_host,
    check_upgrade,
)
from swarmllm.api.http.context import NODE, PROGRESS_STREAMS, current_node
from swarmllm.api.http.errors import (
    as_swarmllm_error,
    error_response,
    failure_response,
    http_error_response,
    log_unexpected,
)
from swarmllm.api.http.fields import HEADER as IGNORED_HEADER
from swarmllm.api.http.fields import ignored_header
from swarmllm.api.http.json import encode
from swarmllm.api.http.openapi import openapi
from swarmllm.api.http.request_tasks import RequestTasks
from swarmllm.api.llamacpp.endpoints import text_tools
from swarmllm.api.ollama.endpoints import ollama
from swarmllm.api.openai.chat import chat
from swarmllm.api.openai.completions import completions
from swarmllm.api.openai.embeddings import embeddings
from swarmllm.api.openai.pictures import FETCHER
from swarmllm.api.openai.remote_pictures import PictureFetcher
from swarmllm.api.openai.rerank import rerank
from swarmllm.api.openai.responses import RESPONSES, ResponseStore, responses
from swarmllm.config import Config
from swarmllm.errors import SwarmLLMError
from swarmllm.keys import KeyRing
from swarmllm.log_filter import REQUEST_ID
from swarmllm.node import ModelView, Node
from swarmllm.node.metrics import CONTENT_TYPE
from swarmllm.pipeline.request import new_request_id

MISSING_SHOWN = 64
"""Ranges of one model."""

health = Blueprint("health", __name__)


@health.get("/health")
async def alive() -> Response:
    return Response(encode({"status": "ok"}), content_type="application/json")


@health.get("/health/ready")
async def ready() -> Response:
    node = current_node()
    readiness, asked = node.readiness(), request.args.get("model")
    body: dict[str, object] = {"status": readiness.status, "reason": readiness.reason}
    if asked is not None:
        if not g.may_name_models:
            raise Unauthorized("This node tells about its models only with an API key.")
        view = await node.models.get(asked)
        # Other models of this node may have failed to load: that says nothing about this one.
        is_ready = view.complete and readiness.status != "stopping"
        body |= {"model": _model_readiness(view)}
    else:
        is_ready = readiness.status == "ready"
        if g.may_name_models:
            body |= {"models": [_model_readiness(view) for view in await node.models.own()]}
    return Response(encode(body), status=200 if is_ready else 503, content_type="application/json")


def _model_readiness(view: ModelView) -> dict[str, object]:
    missing = [str(layers) for layers in view.missing[:MISSING_SHOWN]]
    return {"name": view.name, "complete": view.complete, "missing_layers": missing}


@health.get("/metrics")
async def metrics() -> Response:
    node = current_node()
    return Response(node.metrics.text(await node.models.own()), content_type=CONTENT_TYPE)


OPENAI = (chat, completions, embeddings, rerank, responses)
DIALECTS = (ollama, anthropic, text_tools)
BLUEPRINTS = (*OPENAI, *DIALECTS, admin, downloads, shares, events, dashboard, health, openapi)


class App(QuartTrio):
    asgi_http_class = RequestTasks

    def log_exception(self, exception_info: tuple[Any, ...]) -> None:
        """What no error handler caught, in one line."""
        log_unexpected(exception_info[1])


def is_ollamas(path: str) -> bool:
    """Whether a path belongs to Ollama's API, also one that is not there: errors are strings in that."""
    return path.startswith("/api/") and not path.startswith(("/api/admin", "/api/events"))


def refusal(error: SwarmLLMError) -> Response:
    """In the words of the dialect to which the present request's path belongs."""
    if is_ollamas(request.path):
        return failure_response(error, encode({"error": error.message}))
    return error_response(error)


def create_app(node: Node, config: Config, keys: KeyRing | None = None) -> App:
    """`keys` None: nobody is asked for a key."""
    app = base_app(config, keys)
    app.extensions[NODE] = node
    app.extensions[RESPONSES] = ResponseStore()
    app.extensions[FETCHER] = PictureFetcher()
    works = app.extensions[PROGRESS_STREAMS] = ProgressStreams()
    app.extensions[NODE_SECTIONS] = NodeSections(node, works)
    for blueprint in BLUEPRINTS:
        app.register_blueprint(blueprint)
    return app


def base_app(config: Config, keys: KeyRing | None) -> App:
    """The checks before every request and the shape of every error, and no endpoints."""
    app = App("swarmllm", static_folder=None)
    # The server bounds and times bodies, before they come here.
    app.config["MAX_CONTENT_LENGTH"] = app.config["BODY_TIMEOUT"] = None
    allowed_hosts = frozenset(name.lower() for name in config.api.allowed_hosts)

    origins = Origins(config.api.allowed_origins)
    gater = Authenticator(keys)

    @app.before_request
    async def check() -> Response | None:
        g.request_id = new_request_id()
        REQUEST_ID.set(g.request_id)
        host = request.headers.get("Host", "")
        preflight = origins.answer_preflight(request)
        if preflight is not None:
            return preflight
        key = g.key = await gater.admit(request)
        g.may_name_models = key is not None or not gater.is_required
        # A page on a re-pointed domain has no key, and a node reached from elsewhere has names unknown to it.
        if key is None and not gater.is_required:
            check_host(host, allowed_hosts)
        origins.check(request.headers.get("Origin"), host, request.path)
        origins.check_site(request)
        check_admin_type(request.method, request.path, request.mimetype)
        check_upgrade(request.headers.get("Upgrade", ""))
        return None

    @app.after_request
    async def stamp(response: Response) -> Response:
        response.headers["x-request-id"] = response.headers["request-id"] = g.get("request_id", "")
        response.headers["X-Content-Type-Options"] = "nosniff"
        if ignored := ignored_header():
            response.headers[IGNORED_HEADER] = ignored
        origins.stamp(request, response)
        return response

    @app.errorhandler(HTTPException)
    async def framework_error(error: HTTPException) -> Response:
        response = http_error_response(error)
        if is_ollamas(request.path):
            response.set_data(encode({"error": f"{request.method} {request.path}: {error.name}."}))
        return response

    @app.errorhandler(Exception)
    async def any_error(error: Exception) -> Response:
        return refusal(as_swarmllm_error(error))

    return app
