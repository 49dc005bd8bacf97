"""`proto/wire.md` is the specification: it says of every message and field what the code says, and its
examples decode.

Each message has a heading of level 4 with its name and, where it has fields, a table | field | type | default
| meaning |. The first three columns are compared with what msgspec validates; only the meaning is prose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
import pytest
from msgspec import inspect

from swarmllm.swarm.records.details_book import AskedDetails
from swarmllm.swarm.records.envelope_book import Digest
from swarmllm_proto import codec, file_digests, identifiers, ipc, limits, swarm
from swarmllm_proto import router_messages as neighbours
from swarmllm_proto.blocks import BLOCK_TOKENS
from swarmllm_proto.envelope import Details, Envelope, Heartbeat
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.record_parts import FetchProgress, RecordDetails
from swarmllm_proto.tensors import decode_tensor

WIRE: Final = (Path(__file__).resolve().parents[2] / "proto" / "wire.md").read_text(encoding="utf-8")
STRUCTS: Final[tuple[type[msgspec.Struct], ...]] = (
    ipc.Sampling,
    ipc.TokenLogprob,
    ipc.TokenAgain,
    ipc.KeptRows,
    ipc.GuessCount,
    ipc.Gpu,
    ipc.InfillTokens,
    ipc.KernelChoice,
    ipc.PicturePart,
    swarm.PictureRun,
    *get_args(ipc.AnyDaemonMessage),
    *get_args(ipc.AnyWorkerMessage),
    *(swarm.NodeRecord, swarm.ShardAnnounce, swarm.SharedModel, swarm.NodeCapability),
    *(swarm.SharedFile, swarm.FilePart, swarm.FetchedFile),
    *(swarm.ObservedLatency, swarm.ObservedLink, swarm.NetworkCoordinate, swarm.GpuMemory),
    *(swarm.PipelineAssignment, swarm.Stage, swarm.PipelineAck, swarm.StageTiming, swarm.StageBlocks),
    *(swarm.StageRows, swarm.PrefixCacheAnnounce, swarm.KeptPrefix),
    *(swarm.FileAnnounce, swarm.FetchPiece, swarm.Piece, swarm.Outline),
    *(file_digests.FetchDigests, file_digests.Digests, file_digests.DigestRun),
    *(swarm.TellPrompt, swarm.ProbeStage, swarm.StageState, swarm.FetchRows, swarm.RowsPiece),
    *(swarm.PrefixKvFetch, swarm.PrefixKv, swarm.KeptElsewhere),
    *(swarm.ProjectorAnnounce, swarm.VisionEncodeRequest, swarm.VisionEncodeResponse),
    *get_args(swarm.JobMessage),
    *(Envelope, Heartbeat, Digest, Details, RecordDetails, FetchProgress, AskedDetails),
    *(neighbours.PeerExchangeRequest, neighbours.PeerExchangeResponse, neighbours.KnownPeer),
    *(neighbours.DialBackRequest, neighbours.DialBackResponse, neighbours.DialBack),
)


def describe_number(value: float) -> str:
    for offset, suffix in ((0, ""), (1, "-1")):
        power = int(value + offset).bit_length() - 1
        if value >= 2**16 and value == 2**power - offset:
            return f"2^{power}{suffix}"
    if value >= 1e6 and value == 10 ** (len(str(int(value))) - 1):
        return f"10^{len(str(int(value))) - 1}"
    return f"{value:g}"


def describe_bounds(low: float | None, high: float | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f", from {describe_number(low or 0)}"
    return f", {describe_number(low or 0)} to {describe_number(high)}"


def describe_length(low: int | None, high: int | None, unit: str) -> str:
    if high is None:
        return ""
    if low == high:
        return f", {high} {unit}"
    return f", {low} to {high} {unit}" if low else f", at most {high} {unit}"


def describe(kind: inspect.Type) -> str:
    """A type and its limits, in the words of wire.md."""
    match kind:
        case inspect.BoolType():
            return "bool"
        case inspect.IntType(ge=low, le=high):
            return "int" + describe_bounds(low, high)
        case inspect.FloatType(ge=low, le=high):
            return "float" + describe_bounds(low, high)
        case inspect.StrType(pattern=identifiers.NODE_ID_PATTERN):
            return "node id"
        case inspect.StrType(pattern=identifiers.PUBLISHED_PATTERN):
            return "str, `hf:ORG/REPO:FILE.gguf` or empty"
        case inspect.StrType(pattern=str(), max_length=size):
            return f"str, {size} lower-case hex digits"
        case inspect.StrType(min_length=low, max_length=high):
            return "str" + describe_length(low, high, "characters")
        case (
            inspect.BytesType(min_length=low, max_length=high)
            | inspect.MemoryViewType(min_length=low, max_length=high)
        ):
            return "bytes" + describe_length(low, high, "bytes")
        case inspect.LiteralType(values=values):
            return " or ".join(json.dumps(value) for value in values)
        case inspect.UnionType(types=types):
            return " or ".join(describe(each) for each in types)
        case inspect.NoneType():
            return "null"
        case inspect.StructType(cls=cls):
            return cls.__name__
        case inspect.TupleType(item_types=items):
            return f"[{'; '.join(describe(item) for item in items)}]"
        case (
            inspect.VarTupleType(item_type=item, min_length=low, max_length=high)
            | inspect.ListType(item_type=item, min_length=low, max_length=high)
        ):
            return f"list of ({describe(item)})" + describe_length(low, high, "items")
        case inspect.DictType():
            return "object"
    raise AssertionError(f"wire.md has no words for {kind}")


def describe_default(field: inspect.Field) -> str:
    value = field.default
    if not field.required and value is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
        return "absent"
    if value is msgspec.NODEFAULT:
        return "required"
    if isinstance(value, msgspec.Struct):
        return "all defaults"
    return json.dumps(msgspec.to_builtins(value))


def expected_rows(struct: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return [(f.encode_name, describe(f.type), describe_default(f)) for f in info.fields]


def sections() -> Iterator[tuple[str, str]]:
    for section in re.split(r"^#### ", WIRE, flags=re.M)[1:]:
        name, _, body = section.partition("\n")
        yield name.strip(), re.split(r"^#{1,3} ", body, flags=re.M)[0]


def written_rows(section: str) -> list[tuple[str, str, str]]:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", section, flags=re.M)
    assert all(meaning.strip() for *_, meaning in rows)
    return [(field, kind.strip(), default.strip(" `")) for field, kind, default, _ in rows]


def test_every_message_has_its_section_and_every_section_its_message() -> None:
    names = [name for name, _ in sections()]
    assert sorted(names) == sorted(struct.__name__ for struct in STRUCTS)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_fields_types_limits_and_defaults_are_those_of_the_code(struct: type[msgspec.Struct]) -> None:
    assert written_rows(dict(sections())[struct.__name__]) == expected_rows(struct)


@pytest.mark.parametrize(
    "name", [name for name in vars(limits) if name.isupper() and name not in ("KIB", "MIB")]
)
def test_every_limit_is_written_down(name: str) -> None:
    value: int = getattr(limits, name)
    [written] = re.findall(rf"^\| `{name}` \| ([\d ]+) \|", WIRE, flags=re.M)
    assert int(written.replace(" ", "")) == value


def test_versions_protocols_and_block_size_are_written_down() -> None:
    assert f"`v` is {swarm.WIRE_VERSION}" in WIRE
    assert f"{BLOCK_TOKENS} tokens" in WIRE
    assert f"`digest` are the last {swarm.DIGEST_SIZE} bytes" in WIRE


def hex_example(name: str) -> bytes:
    """The bytes of the fenced block after `<!-- example: name -->`: hex left of `|`, what it means right of
    it."""
    [block] = re.findall(rf"<!-- example: {name} -->\n```\n(.*?)```", WIRE, flags=re.S)
    return bytes.fromhex("".join(line.partition("|")[0] for line in block.splitlines()))


def test_tensor_example_decodes_as_it_says() -> None:
    np.testing.assert_array_equal(
        decode_tensor(hex_example("tensor")), np.array([[1.0, -2.5, 0.0], [0.5, 2.0, 65504.0]], np.float32)
    )


def test_frame_example_decodes_as_it_says() -> None:
    decoder = FrameDecoder()
    [frame] = decoder.feed(hex_example("frame"))
    decoder.eof()
    assert codec.decode_worker_message(frame) == ipc.Token(id=7, request_id="r1", index=0, token=42)
    assert bytes(frame.payload) == b"Hi"


def test_other_sections_name_no_field_table_by_mistake() -> None:
    rows: list[Any] = [row for _, body in sections() for row in written_rows(body)]
    assert len(rows) == len(re.findall(r"^\| `[a-z_0-9]+` \|.*\|.*\|.*\|$", WIRE, flags=re.M))
