"""Reads Ollama's Modelfile: the name of the model, and the settings that become a preset.

Instructions about how a machine computes are ignored and reported. Instructions that would change the answer
and are not supported are refused with their line. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from swarmllm.errors import InvalidRequest
from swarmllm.models.go_template import translate
from swarmllm.models.presets import Preset

MAX_BYTES = 256 * 1024
COMPUTING = frozenset(
    {
        *("num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
        *("use_mmap", "use_mlock", "vocab_only", "penalize_newline", "num_gqa"),
    }
)
"""Parameters that change nothing here: the node's configuration decides."""
_INTEGERS = frozenset({"top_k", "seed", "mirostat", "num_ctx", "num_predict", "repeat_last_n"})
_FLOATS = frozenset(
    {
        *("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty"),
        *("frequency_penalty", "mirostat_tau", "mirostat_eta"),
    }
)
_INSTRUCTION = re.compile(r"[ \t]*([A-Za-z]+)[ \t]+(.*)", re.DOTALL)
_QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class Modelfile:
    source: str
    """What FROM names: a model, or a path."""
    preset: Preset
    left_out: tuple[str, ...]
    """What changes nothing here, in words."""


def parse_modelfile(text: str, *, own_template: bool = False) -> Modelfile:
    """`own_template`: leave TEMPLATE out, the model has one; else it is translated. Raises InvalidRequest
    naming line and instruction."""
    if len(text.encode()) > MAX_BYTES:
        raise InvalidRequest(f"a Modelfile is at most {MAX_BYTES} bytes", field="modelfile")
    source, system, template = "", "", ""
    parameters: dict[str, object] = {}
    left_out: list[str] = []
    for line, name, value in _instructions(text):
        where = f"line {line}: {name}"
        match name:
            case "FROM":
                if source:
                    raise _bad(f"{where} appears twice")
                source = value
            case "SYSTEM":
                system = value
            case "PARAMETER":
                key, _, said = value.partition(" ")
                add_parameter(parameters, key.lower(), said.strip().strip('"'), where, left_out)
            case "TEMPLATE":
                if own_template:
                    left_out.append("TEMPLATE (the model's own chat template is used)")
                    continue
                try:
                    template = translate(value)
                except InvalidRequest as error:
                    raise _bad(
                        f"line {line}: {error.message}; the model's own chat template"
                        " (tokenizer.chat_template of the GGUF) is used where it is left out: remove it, or"
                        " import with --own-template"
                    ) from None
            case "LICENSE":
                left_out.append("LICENSE")
            case "ADAPTER" | "MESSAGE":
                raise _bad(f"{where} is not supported here; leave it out")
            case _:
                raise _bad(f"{where[:80]} is no instruction of a Modelfile")
    if not source:
        raise _bad("there is no FROM")
    return Modelfile(source, preset_of(system, parameters, template), tuple(left_out))


def add_parameter(
    parameters: dict[str, object], key: str, said: object, where: str, left_out: list[str]
) -> None:
    """Raises InvalidRequest for what is no parameter, or no number where it should be one."""
    field = f"{where} {key[:40]}"
    if key in COMPUTING:
        left_out.append(f"PARAMETER {key}")
    elif key == "stop":
        stops = parameters.setdefault("stop", [])
        assert isinstance(stops, list)
        stops += said if isinstance(said, list) else [said]
    elif key in _INTEGERS or key in _FLOATS:
        try:
            parameters[key] = int(str(said)) if key in _INTEGERS else float(str(said))
        except ValueError:
            raise _bad(f"{field}: {str(said)[:40]!r} is no number") from None
    elif key == "tfs_z":
        if str(said) not in ("1", "1.0"):
            raise _bad(f"{field} is not supported here; leave it out")
    else:
        raise _bad(f"{field} is no parameter that is known here")


def preset_of(system: str, parameters: dict[str, object], template: str = "") -> Preset:
    """`template`: Jinja. Raises InvalidRequest for a number that is out of bounds."""
    sampling = dict(parameters)
    fields: dict[str, object] = {"system": system} if system else {}
    if template:
        fields["template"] = template
    for ours, theirs in (("context", "num_ctx"), ("max_tokens", "num_predict")):
        number = sampling.pop(theirs, None)
        if isinstance(number, int) and number > 0:  # Ollama's -1 and -2 mean: as long as there is room
            fields[ours] = number
    if isinstance(seed := sampling.get("seed"), int) and seed < 0:
        del sampling["seed"]  # draw one
    try:
        return msgspec.convert(fields | ({"sampling": sampling} if sampling else {}), Preset)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise _bad(f"{_instruction_of(place.rstrip('`'))}: {what}") from error


def _instruction_of(place: str) -> str:
    """The line of a Modelfile from which a field of a preset comes, as `sampling.top_p`."""
    field = place.removeprefix("sampling.").partition("[")[0]
    if field in ("system", "template"):
        return field.upper()
    return f"PARAMETER {({'context': 'num_ctx', 'max_tokens': 'num_predict'}).get(field, field)}"


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, NAME, value); a value in three quotes may have several lines."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first, line = at + 1, lines[at]
        at += 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _INSTRUCTION.fullmatch(line)
        if match is None:
            raise _bad(f"line {first}: {line.strip()[:40]!r} is no instruction with a value")
        value = match[2].strip()
        if value.startswith(_QUOTES):
            said = [value.removeprefix(_QUOTES)]
            while _QUOTES not in said[-1]:
                if at == len(lines):
                    raise _bad(f"line {first}: the three quotes are never closed")
                said.append(lines[at])
                at += 1
            last, _, rest = said[-1].partition(_QUOTES)
            if rest.strip():
                raise _bad(f"line {at}: there is something after the three quotes")
            value = "\n".join([*said[:-1], last])
        elif len(value) > 1 and value[0] == value[-1] == '"':
            value = value[1:-1]
        yield first, match[1].upper(), value


def _bad(message: str) -> InvalidRequest:
    return InvalidRequest(message, field="modelfile")
