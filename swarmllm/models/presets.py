"""Presets: defaults for requests to a model under one of its names.

A preset belongs to a name and not to the model, so that one model can be several assistants. It is kept in
the catalogue's database, and written as TOML where people read or write it:

    system = "You answer in one sentence."
    context = 8192
    max_tokens = 400

    [sampling]
    temperature = 0.2
    stop = ["###"]
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmllm.errors import InvalidRequest, ModelNotFound
from swarmllm.models.catalogue import Catalogue
from swarmllm_proto.ipc import Effort

MAX_SYSTEM_CHARACTERS = 64 * 1024
MAX_TEMPLATE_CHARACTERS = 64 * 1024
MAX_TOML_BYTES = 256 * 1024

Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class SamplingDefaults(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """As requests call them; None: as if there were no preset."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repeat_penalty: Annotated[float, Meta(ge=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=0, le=1024)] | None = None
    seed: Annotated[int, Meta(ge=0, lt=2**32)] | None = None
    stop: Annotated[list[Annotated[str, Meta(min_length=1, max_length=1024)]], Meta(max_length=16)] | None = (
        None
    )
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Meta(ge=0, le=100)] | None = None
    mirostat_eta: Share | None = None
    exact: bool | None = None


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    system: Annotated[str, Meta(max_length=MAX_SYSTEM_CHARACTERS)] = ""
    """The system message of conversations that have none."""
    template: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARACTERS)] = ""
    """The chat template (Jinja) in place of the model's."""
    context: Annotated[int, Meta(ge=16, le=2**24)] | None = None
    """KV cells with which the model is loaded under this name."""
    max_tokens: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    reasoning_effort: Effort | None = None
    """How much the model thinks before it answers, where its chat template can be told; none: not at all."""
    keep_alive_s: Annotated[float, Meta(ge=-1, le=2**31)] | None = None
    """How long the model stays after a request for which it was loaded; -1: for ever."""
    sampling: SamplingDefaults = SamplingDefaults()


NO_PRESET = Preset()


def laid_over(before: Preset, new: Preset) -> Preset:
    """What `new` says, and where it says nothing what `before` does."""
    said = msgspec.to_builtins(before) | msgspec.to_builtins(new)
    sampling = msgspec.to_builtins(before.sampling) | msgspec.to_builtins(new.sampling)
    return msgspec.convert(said | {"sampling": sampling}, Preset)


def read_toml(text: str) -> Preset:
    """Raises InvalidRequest naming the key."""
    if len(text.encode()) > MAX_TOML_BYTES:
        raise InvalidRequest(f"a preset is at most {MAX_TOML_BYTES} bytes", field="preset")
    try:
        return msgspec.toml.decode(text, type=Preset)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"that is no preset: {error}", field="preset") from error


def write_toml(preset: Preset) -> str:
    """What `read_toml` reads."""
    fields = msgspec.to_builtins(preset)
    sampling = fields.pop("sampling", {})
    lines = [f"{key} = {_value(value)}" for key, value in fields.items()]
    if sampling:
        lines += ["", "[sampling]", *(f"{key} = {_value(value)}" for key, value in sampling.items())]
    return "".join(f"{line}\n" for line in lines).lstrip("\n")


def _value(value: object) -> str:
    """TOML writes strings, numbers and lists of them as JSON does, but for one character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class Presets:
    """Every method blocks."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    def all(self) -> dict[str, Preset]:
        """By name, also by names that lead to no model any more."""
        with self._catalogue.database() as database:
            rows = database.execute("SELECT name, preset FROM presets").fetchall()
            return {name: msgspec.json.decode(preset, type=Preset) for name, preset in rows}

    def put(self, name: str, preset: Preset) -> None:
        """Raises ModelNotFound where no model of the catalogue has this name; an id is none."""
        entry = self._catalogue.get(name)
        if name not in (entry.name, *entry.further_names):
            raise ModelNotFound(f"a preset belongs to a name; the model's is {entry.name}", field="model")
        if preset == NO_PRESET:
            self.drop(name)
            return
        with self._catalogue.database() as database:
            row = (name, msgspec.json.encode(preset))
            database.execute("INSERT OR REPLACE INTO presets VALUES (?, ?)", row)

    def drop(self, *names: str) -> None:
        with self._catalogue.database() as database:
            database.executemany("DELETE FROM presets WHERE name = ?", [(name,) for name in names])
