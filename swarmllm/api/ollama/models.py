"""Ollama's API for managing models: facts about one, further names, presets, removal, fetching.

A name with a preset is what Ollama calls a model that was created from another. Blobs, adapters and
example messages have no counterpart here and are refused by name. Everything that changes something counts as
administration (`ADMIN_PREFIXES`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import trio
from msgspec import Meta
from quart import Response

from swarmllm.api.http.context import current_node
from swarmllm.api.http.errors import read_body
from swarmllm.api.http.fields import read_request
from swarmllm.api.http.json import encode
from swarmllm.api.ollama.reply import timestamp
from swarmllm.api.openai.schema import Json, ModelName
from swarmllm.downloads import Download, DownloadRequest, DownloadView
from swarmllm.downloads.source import MAX_SOURCE_LENGTH
from swarmllm.errors import InvalidRequest, ModelNotFound
from swarmllm.models.entry import n_parameters, parameter_size, quantisation
from swarmllm.models.go_template import translate
from swarmllm.models.modelfile import add_parameter, preset_of
from swarmllm.models.names import check_name
from swarmllm.models.presets import (
    MAX_SYSTEM_CHARACTERS,
    MAX_TEMPLATE_CHARACTERS,
    Preset,
    laid_over,
)
from swarmllm.node import ModelView

TAG = ":latest"
HUB_PREFIXES = ("hf.co/", "huggingface.co/")
"""Ollama's words for a repository on Hugging Face."""
LOOK_EVERY_S = 0.25
_QUOTES = '"""'

Source = Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE_LENGTH)]


class OllamaShow(msgspec.Struct, frozen=True):
    """POST /api/show; `name` is the older word for `model`."""

    model: ModelName | None = None
    name: ModelName | None = None
    verbose: bool | None = None


class OllamaCopy(msgspec.Struct, frozen=True):
    """POST /api/copy."""

    source: ModelName
    destination: ModelName


class OllamaDelete(msgspec.Struct, frozen=True):
    """DELETE /api/delete; `name` is the older word for `model`."""

    model: ModelName | None = None
    name: ModelName | None = None


class OllamaPull(msgspec.Struct, frozen=True):
    """POST /api/pull; `name` is the older word for `model`."""

    model: Source | None = None
    name: Source | None = None
    insecure: bool | None = None
    stream: bool | None = None


class OllamaCreate(msgspec.Struct, frozen=True, kw_only=True):
    """POST /api/create; `name` is the older word for `model`."""

    model: ModelName | None = None
    name: ModelName | None = None
    from_: Annotated[str, Meta(max_length=200)] | None = msgspec.field(default=None, name="from")
    system: Annotated[str, Meta(max_length=MAX_SYSTEM_CHARACTERS)] | None = None
    parameters: dict[str, object] | None = None
    stream: bool | None = None
    template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)] | None = None
    # without a counterpart here
    files: dict[str, str] | None = None
    adapters: dict[str, str] | None = None
    messages: list[object] | None = None
    quantize: str | None = None
    modelfile: str | None = None
    license: object = None


_REFUSED = {
    "files": "is not supported here; add the file on the node: swarmllm models add PATH.",
    "adapters": "is not supported here.",
    "messages": "is not supported here.",
    "quantize": "is not supported here; a model stays as it was published.",
    "modelfile": "is not taken here; import it: swarmllm models create NAME -f Modelfile.",
}


async def catalogue_name(asked: str) -> str:
    """The model's name in the catalogue: apps append a tag that nobody typed."""
    if asked.endswith(TAG):
        names = {view.name for view in await current_node().models.own()}
        if asked not in names:
            return asked.removesuffix(TAG)
    return asked


async def show() -> Response:
    body = await read_request(OllamaShow, any_type=True)
    name = await catalogue_name(_named(body.model, body.name))
    view = await current_node().models.get(name)
    if view.entry is None:
        raise ModelNotFound(f"model {name!r} is only on other nodes.", field="model")
    manifest, preset = view.entry.manifest, await current_node().models.presets.get(name)
    family = manifest.architecture
    return _json(
        {
            "details": details(view),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": n_parameters(manifest),
                f"{family}.block_count": manifest.n_layers,
                f"{family}.context_length": manifest.context_length,
                f"{family}.embedding_length": manifest.n_embd,
            },
            "modelfile": modelfile(view.entry.name, preset),
            "parameters": "\n".join(f"{key} {value}" for key, value in _parameters(preset)),
            **({"system": preset.system} if preset.system else {}),
            **({"template": preset.template} if preset.template else {}),
            "capabilities": [
                *("completion", "tools", "embedding"),
                *(["vision"] if view.takes_pictures else []),
                *(["audio"] if view.takes_sounds else []),
            ],
            "modified_at": modified(view),
        }
    )


async def copy() -> Response:
    """A further name, with the preset of the one that is copied."""
    body = await read_body(OllamaCopy)
    models = current_node().models
    source = await catalogue_name(body.source)
    destination = await _new_name(body.destination, "destination")
    await models.alias(source, destination)
    await models.presets.put(destination, await models.presets.get(source))
    return Response(b"", status=200)


async def delete() -> Response:
    body = await read_body(OllamaDelete)
    await current_node().models.remove(await catalogue_name(_named(body.model, body.name)))
    return Response(b"", status=200)


async def create() -> Response:
    """A further name of a model that is known here, with a preset."""
    body = await read_body(OllamaCreate)
    for field, why in _REFUSED.items():
        if getattr(body, field):
            raise InvalidRequest(f"{field} {why}", field=field)
    if not body.from_:
        raise InvalidRequest("Missing field `from`: the name of a model that is known here.", field="from")
    name = await _new_name(_named(body.model, body.name), "model")
    parameters: dict[str, object] = {}
    for key, value in (body.parameters or {}).items():
        add_parameter(parameters, key, value, "parameters", [])
    models = current_node().models
    source = await catalogue_name(body.from_)
    before = await models.presets.get(source)
    template = translate(body.template) if body.template else ""
    preset = laid_over(before, preset_of(body.system or "", parameters, template))
    await models.alias(source, name)
    await models.presets.put(name, preset)
    if body.stream is False:
        return _json({"status": "success"})
    lines = b"".join(encode({"status": status}) + b"\n" for status in ("writing manifest", "success"))
    return Response(lines, content_type="application/x-ndjson")


async def pull() -> Response:
    """A model from Hugging Face, in Ollama's spelling or in the node's own. What is known here is there."""
    body = await read_body(OllamaPull)
    if body.insecure:
        raise InvalidRequest("insecure is not supported here.", field="insecure")
    asked = _named(body.model, body.name)
    source = hub_source(asked)
    if source is None:
        await current_node().models.get(await catalogue_name(asked))
        statuses = _statuses(None)
    else:
        statuses = _statuses(current_node().downloads.start(DownloadRequest(source)))
    if body.stream is False:
        last: Json = {}
        async for status in statuses:
            last = status
        return (
            _json(last)
            if "error" not in last
            else Response(encode(last), 502, content_type="application/json")
        )
    response = Response(_lines(statuses), content_type="application/x-ndjson")
    response.timeout = None
    response.headers["Cache-Control"] = "no-cache"
    response.headers["X-Accel-Buffering"] = "no"
    return response


def hub_source(asked: str) -> str | None:
    """What `asked` is for a download; None: it is a model's name."""
    for prefix in HUB_PREFIXES:
        if asked.startswith(prefix):
            return f"hf:{asked.removeprefix(prefix).removesuffix(TAG)}"
    return asked.removesuffix(TAG) if asked.startswith(("hf:", "https://", "http://")) else None


async def _statuses(download: Download | None) -> AsyncIterator[Json]:
    """As Ollama words them, a change each. A client that leaves ends the looking on, not the download."""
    yield {"status": "pulling manifest"}
    if download is not None:
        shown: Json = {}
        while not download.ended.is_set():
            if (status := _status(download.view())) != shown:
                yield (shown := status)
            with trio.move_on_after(LOOK_EVERY_S):
                await download.ended.wait()
        view = download.view()
        if view.state != "done":
            yield {"error": view.error or "it was cancelled"}
            return
        yield {"status": f"the model is called {view.model}"}
    yield {"status": "success"}


def _status(view: DownloadView) -> Json:
    if view.state == "checking":
        return {"status": "verifying sha256 digest"}
    if not view.total_bytes:
        return {"status": "pulling manifest"}
    # Clients draw a bar for each digest; the file's is not known before it is here.
    digest = f"sha256:{hashlib.sha256(view.source.encode()).hexdigest()}"
    status = f"pulling {digest[7:19]}"
    return {"status": status, "digest": digest, "total": view.total_bytes, "completed": view.done_bytes}


async def _lines(statuses: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    async for status in statuses:
        yield encode(status) + b"\n"


def details(view: ModelView) -> Json:
    assert view.entry is not None
    manifest = view.entry.manifest
    return {
        "format": "gguf",
        "family": manifest.architecture,
        "families": [manifest.architecture],
        "parameter_size": parameter_size(manifest),
        "quantization_level": quantisation(manifest),
    }


def modified(view: ModelView) -> str:
    assert view.entry is not None
    return timestamp(datetime.fromtimestamp(view.entry.modified_s, UTC))


def modelfile(source: str, preset: Preset) -> str:
    """What creates the preset from the model that is called `source`, but for what no Modelfile can say: a
    template in Jinja, and three quotes in a system prompt."""
    lines = [f"FROM {source}"]
    if _QUOTES in preset.system:
        lines.append("# Its SYSTEM has three quotes: see the field `system`.")
    elif preset.system:
        lines.append(f"SYSTEM {_QUOTES}{preset.system}{_QUOTES}")
    lines += [f"PARAMETER {key} {value}" for key, value in _parameters(preset)]
    if preset.template:
        lines.append("# Its TEMPLATE is in Jinja: see the field `template`.")
    return "\n".join(lines) + "\n"


def _parameters(preset: Preset) -> list[tuple[str, str]]:
    """As a Modelfile has them."""
    said: list[tuple[str, str]] = []
    if preset.context is not None:
        said.append(("num_ctx", str(preset.context)))
    if preset.max_tokens is not None:
        said.append(("num_predict", str(preset.max_tokens)))
    for key, value in msgspec.to_builtins(preset.sampling).items():
        said += [(key, encode(each).decode()) for each in (value if isinstance(value, list) else [value])]
    return said


def _named(model: str | None, name: str | None) -> str:
    if not (asked := model or name):
        raise InvalidRequest("Missing field `model`.", field="model")
    return asked


async def _new_name(asked: str, field: str) -> str:
    """Without the tag. Raises InvalidRequest for what is no name here."""
    name = asked.removesuffix(TAG)
    try:
        check_name(name)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, field=field) from None
    return name


def _json(body: object) -> Response:
    return Response(encode(body), content_type="application/json")
