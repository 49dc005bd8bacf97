"""Every failure as OpenAI's error object, and the body decoder whose failures name the field.

msgspec reports where it stopped (`$.messages[0].role`); OpenAI's clients look at `param`
(`messages[0].role`). An unknown or missing field is not part of msgspec's path, so it is appended. Unexpected
exceptions leave as a plain 500 without their text. The log gets one line without it, since it may quote what
the user sent, and a bounded number of such lines, since a client may have found out how to provoke them.
"""

from __future__ import annotations

import logging
import math
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import msgspec
from quart import Response, request
from werkzeug.exceptions import HTTPException

from swarmllm.errors import ContextFull, InvalidRequest, NodeStopping, Overloaded, SwarmLLMError
from swarmllm.log_filter import provoked_by

log = logging.getLogger(__name__)

T = TypeVar("T")

_AT = re.compile(r" - at `(key in )?\$\.?(?P<path>[^`]*)`$")
_FIELD = re.compile(r"^Object (?P<fault>contains unknown|missing required) field `(?P<name>[^`]*)`")
_ITEM = re.compile(r"\[\d+\]")
DEFAULT_RETRY_AFTER_S = 1.0
N_FRAMES = 8
BRACKETS_MAX = 2**18
"""Of a body, those in texts included: each may be an object of Python, a million of which take a second."""


class UnsupportedMedia(InvalidRequest):
    http_status = 415
    code = "unsupported_media_type"


class Forbidden(InvalidRequest):
    http_status = 403
    error_type = "permission_error"
    code = "forbidden"


class UnexpectedError(SwarmLLMError):
    """The error that a client gets for an unexpected fault of this program."""


async def read_body(kind: type[T], *, optional: bool = False, any_type: bool = False) -> T:
    """The request's JSON body as `kind`. Raises InvalidRequest with `field`, UnsupportedMedia.

    `application/json` is required because a web page may send every other type to us without asking us first;
    `any_type` is for APIs whose own examples send another, and leaves pages to the check of the Origin.
    """
    return decode_body(await body_bytes(optional=optional, any_type=any_type), kind)


async def body_bytes(*, optional: bool = False, any_type: bool = False) -> bytes:
    """The request's body, unparsed. Raises UnsupportedMedia, and InvalidRequest for one of too many parts."""
    data = await request.get_data(cache=False)
    if optional and not data:
        return b"{}"
    if not any_type and request.mimetype != "application/json":
        raise UnsupportedMedia("Send the body as Content-Type: application/json.", field="Content-Type")
    assert isinstance(data, bytes)
    if data.count(b"[") + data.count(b"{") > BRACKETS_MAX:
        raise InvalidRequest(f"The body has more than {BRACKETS_MAX} lists and objects.")
    return data


def decode_body(data: bytes | str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _named(text: str) -> InvalidRequest:
    at = _AT.search(text)
    message, path = (text[: at.start()], at["path"]) if at else (text, "")
    field = _FIELD.match(message)
    if field:
        path = f"{path}.{field['name']}" if path else field["name"]
        message = (
            "Unknown field" if field["fault"] == "contains unknown" else "Missing field"
        ) + f" `{path}`."
    return InvalidRequest(f"{path}: {message}" if path and not field else message, field=path or None)


def error_object(error: SwarmLLMError) -> dict[str, object]:
    told: dict[str, object]
    told = {"message": error.message, "type": error.error_type, "param": error.field, "code": error.code}
    if isinstance(error, ContextFull) and error.n_prompt_tokens is not None:
        # As llama.cpp's server tells them.
        told |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    return told


def error_response(error: SwarmLLMError) -> Response:
    body = msgspec.json.encode({"error": error_object(error)})
    return failure_response(error, body)


def message_with_field(failure: SwarmLLMError) -> str:
    """For dialects whose errors have no place for the field."""
    name, message = failure.field, failure.message
    is_named = not name or message.startswith(name) or f"`{name}`" in message
    return message if is_named else f"{name}: {message}"


def rename_field(failure: SwarmLLMError, names: Mapping[str, str]) -> None:
    """Name a field as the request does, and not as the chat call does that it became. `names`: from the
    call's to the request's; `[]` stands for any item of a list, and what is inside a field moves with it."""
    if not failure.field:
        return
    numbers, path = _ITEM.findall(failure.field), _ITEM.sub("[]", failure.field)
    for ours, theirs in names.items():
        if path == ours or path.startswith((f"{ours}.", f"{ours}[")):
            path = theirs + path[len(ours) :]
            break
    for number in numbers:
        path = path.replace("[]", number, 1)
    failure.field = path


def failure_response(error: SwarmLLMError, body: bytes) -> Response:
    """`body` with the status and the headers of the error, whatever dialect words it."""
    response = Response(body, status=error.http_status, content_type="application/json")
    if error.http_status == HTTPStatus.TOO_MANY_REQUESTS or isinstance(error, NodeStopping):
        wait_s = DEFAULT_RETRY_AFTER_S
        if isinstance(error, Overloaded | NodeStopping):
            wait_s = error.retry_after_s
        response.headers["Retry-After"] = str(math.ceil(wait_s))
    if error.http_status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def http_error_response(error: HTTPException) -> Response:
    """Errors of the framework (404, 405 ...) in OpenAI's shape, keeping headers such as Allow."""
    status = error.code or 500
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = f"{request.method} {request.path}: {error.name}."
    code = error.name.lower().replace(" ", "_")
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    response = Response(msgspec.json.encode(body), status=status, content_type="application/json")
    for name, value in error.get_headers():
        if name.lower() not in {"content-type", "content-length"}:
            response.headers[name] = value
    return response


def as_swarmllm_error(error: BaseException) -> SwarmLLMError:
    """The error to report for anything raised by the packages below; groups of errors are unwrapped."""
    if isinstance(error, SwarmLLMError):
        return error
    if isinstance(error, BaseExceptionGroup):
        ours, others = error.split(SwarmLLMError)
        if ours is not None and others is None:
            return as_swarmllm_error(ours.exceptions[0])
    log_unexpected(error)
    return UnexpectedError("This node hit an unexpected error; its log says more.")


def log_unexpected(error: BaseException) -> None:
    """The type of an error and its way through the code, not its words: they may quote a prompt."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            log_unexpected(each)
        return
    frames = traceback.extract_tb(error.__traceback__)[-N_FRAMES:]
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    kind = type(error).__qualname__
    provoked_by(log, "http").error("unexpected error in a request: %s at %s", kind, places or "?")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Exception groups leave as the one SwarmLLMError they carry; cancellation passes."""
    try:
        yield
    except ExceptionGroup as group:
        raise as_swarmllm_error(group) from group
