"""Gives handlers the node, the caller, the model and the conversation of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from quart import current_app, g, has_request_context, request

from swarmllm.api.admin.progress import ProgressStreams
from swarmllm.config import Config
from swarmllm.errors import InvalidRequest
from swarmllm.keys import ApiKey
from swarmllm.models.manifest import is_text_encoder
from swarmllm.node import Node
from swarmllm.pipeline.request import new_request_id
from swarmllm.scheduling.tiers import LOCAL, Caller

NODE = "swarmllm.node"
PROGRESS_STREAMS = "swarmllm.works"


def current_node() -> Node:
    return cast(Node, current_app.extensions[NODE])


def current_caller() -> Caller:
    """On whose behalf the present request runs: what its key says."""
    key = cast("ApiKey | None", g.get("key")) if has_request_context() else None
    return Caller(key.id, key.tier, key.rate_limit) if key is not None else LOCAL


def current_request_id() -> str:
    """What the response says in `x-request-id`."""
    return str(g.request_id) if has_request_context() and "request_id" in g else new_request_id()


def current_charge() -> Callable[[int], bool]:
    """Takes bytes of the room for bodies, for the present request's client and until its end. False: there is
    no room."""
    return cast("Callable[[int], bool]", request.scope["state"]["charge"])


def current_config() -> Config:
    return current_node().config


def current_progress_streams() -> ProgressStreams:
    return cast(ProgressStreams, current_app.extensions[PROGRESS_STREAMS])


async def model_or_only_one(name: str | None, *, prefers_encoders: bool = False) -> str:
    """For endpoints whose original serves one model and therefore takes no name: the one that can answer now.
    `prefers_encoders`: the one that encodes whole texts, where there is one; it need not be loaded.

    Raises InvalidRequest where that is not clear.
    """
    if name is not None:
        return name
    views = await current_node().models.own()
    names = [view.name for view in views if view.complete]
    if prefers_encoders:
        names = [each.name for each in views if each.entry and is_text_encoder(each.entry.manifest)] or names
    if len(names) == 1:
        return names[0]
    known = names or [view.name for view in views]
    listed = ", ".join(known[:NAMES_MAX]) + ", ..." * (len(known) > NAMES_MAX)
    if names:
        message = f"Which model? Send `model`: {listed}."
    elif known:
        message = f"No model is complete here now; send `model` to name one that is known: {listed}."
    else:
        message = "No model is known here; add one with: swarmllm models add PATH"
    raise InvalidRequest(message, field="model")


HEADER = "x-session-id"
SESSION_MAX = 256
"""Characters; the wire's limit."""
NAMES_MAX = 5
"""Of models that an error lists."""


def session_of(*fields: str | None) -> str:
    """The first field of the body that says something, then the header, then the other fields; "" for no
    session."""
    session_id, *others = (*fields, None)
    header = request.headers.get(HEADER, "")
    named = next((name for name in (session_id, header, *others) if name), "")
    if len(named) > SESSION_MAX:
        raise InvalidRequest(f"a session's name has at most {SESSION_MAX} characters.", field="session_id")
    return named
