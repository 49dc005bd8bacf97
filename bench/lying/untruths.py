"""Well-formed untruths, derived from the types of the messages between nodes (hypothesis strategies).

`wire_values(kind, world)` gives what MessagePack would make of a message of that type: every field is drawn
by what its name means (`MEANINGS`), else by its type and limits, so that a new message type or field is
covered without a line here. Most values are valid and wrong in meaning: ids of others, ranges outside the
model, numbers at every limit. In one message of eight a single value breaks its type or limit as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

import msgspec
import msgspec.inspect as types
import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from swarmllm_proto import (
    swarm,
)
from swarmllm_proto.tensors import encode_tensor

Draw: TypeAlias = Callable[[st.SearchStrategy[Any]], Any]
Meaning: TypeAlias = Callable[["World", Mapping[str, Any]], st.SearchStrategy[Any]]
"""(world, the fields before it in the same message) -> its values."""

LIVE: Final = "@request"
"""Stands for the id of a request that is under way when the lie is told."""
OWN: Final = "@self"
HONEST: Final = ("@honest0", "@honest1", "@honest2")
ADDRESSES: Final = ("@address0", "@address1", "@address2")
"""Stand for node ids, and for addresses without /p2p, so that a lie is the same in every run."""
INNER: Final = "@encoded"
"""The only key of a dict that stands for the bytes of its value."""
BAD_IDS: Final = (
    *("0OIl0OIl0OIl0OIl", "x", "12D3KooW", "12D3KooW" + "1" * 44, "Qm" + "z" * 44, "..", "a" * 128),
    *("12D3KooW\u0000evil", "<b>peer</b>", "\u202e1KDooW", "1" * 52, "/ip4/127.0.0.1/tcp/1"),
)
TEXTS: Final = (
    *(
        "",
        " ",
        "guide",
        "x" * 200,
        "a\r\nX-Evil: 1",
        "\u0000",
        "\u202eevil",
        "\x1b[31mred",
        "%s%n{0}",
        "<script>",
    ),
    *(
        "'; DROP TABLE models; --",
        "../../etc/passwd",
        "\ud7ff\U0010ffff",
        "{}",
        'le="+Inf"',
        "not_loaded",
        "busy",
    ),
)
KINDS: Final = (
    "NodeUnreachable",
    "node_unreachable",
    "context_full",
    "overloaded",
    "busy",
    "damaged",
    "worker_error",
)
INTEGERS: Final = (0, 1, 2, 3, 4, 8, 11, 12, 13, 255, 256, 65535, 2**31 - 1, 2**53, 2**63 - 1)
FLOATS: Final = (0.0, -0.0, 5e-324, 1e-300, 1e-12, 0.001, 1.0, 30.0, 1e9, 1e15, 1e18, 1e300)
WILD_NUMBERS: Final = (
    *(math.nan, math.inf, -math.inf, 1e300, -1e-300, -1, -(2**63), 2**63, 2**64 - 1, 0.5),
    *(None, True, "1", b""),
)
WILD: Final = (
    *(None, True, -1, -(2**63), 2**63, 2**64 - 1, math.nan, math.inf, -math.inf, 1e300, -1e-300),
    *("", "0", "x" * 70_000, b"", b"\xff" * 40, [], [[]], [[1, 0]], {}, {"type": "NodeRecord"}),
)
TWISTED_ONE_IN: Final = 8


@dataclass(frozen=True)
class World:
    """What a liar knows of the swarm."""

    model_id: str
    n_layers: int
    n_vocab: int
    n_embd: int
    own_id: str = OWN
    honest_ids: tuple[str, ...] = HONEST
    addresses: tuple[str, ...] = ADDRESSES
    """Of honest nodes, without /p2p."""
    request_ids: tuple[str, ...] = (LIVE,)
    other_ids: tuple[str, ...] = field(default=("12D3KooWLCC4TioimmpGCBGBicXNBNerhjAQaCnA3wfPunmnz7c9",))
    """Node ids that can be, of nobody who is there."""


def valid_ids(world: World) -> tuple[str, ...]:
    return (world.own_id,) * 6 + world.honest_ids * 2 + world.other_ids


def node_ids(world: World) -> st.SearchStrategy[str]:
    """Most of them can be one."""
    return st.sampled_from(valid_ids(world) * 3 + BAD_IDS)


def addresses(world: World) -> st.SearchStrategy[str]:
    """Of others, of nobody, through relays that are none."""
    ids = st.sampled_from((*world.honest_ids, *world.other_ids, world.own_id, *BAD_IDS))
    hosts = st.sampled_from(
        ("127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "169.254.1.1", "192.0.2.1", "300.1.1.1", "")
    )
    ports = st.sampled_from((0, 1, 9, 80, 65535, 65536, -1))
    plain = st.builds("/ip4/{}/tcp/{}".format, hosts, ports)
    sixth = st.builds(
        "/ip6/{}/tcp/{}".format, st.sampled_from(("::1", "::", "fe80::1", ":::", "ff02::1")), ports
    )
    names = st.builds(
        "/dns4/{}/tcp/{}".format,
        st.sampled_from(("localhost", "a..b", "x" * 64 + ".invalid", "\u00e4.invalid")),
        ports,
    )
    known = st.sampled_from(world.addresses)
    any_of = st.one_of(known, plain, sixth, names)
    proven = st.builds("{}/p2p/{}".format, any_of, ids)
    circuit = st.builds("{}/p2p/{}/p2p-circuit".format, any_of, ids)
    beyond = st.builds("{}/p2p/{}/p2p-circuit/p2p/{}".format, any_of, ids, ids)
    odd = st.sampled_from(
        ("/", "//", "", "/tcp/1", "/p2p-circuit", "/unix/etc", "/ip4/1.2.3.4/udp/1/quic", "x" * 200)
    )
    return st.one_of(known, plain, sixth, names, proven, circuit, beyond, odd)


def model_ids(world: World) -> st.SearchStrategy[str]:
    return st.sampled_from((world.model_id,) * 4 + ("0" * 64, "f" * 64, world.model_id[::-1]))


def layer_counts(world: World) -> st.SearchStrategy[int]:
    return st.sampled_from((world.n_layers,) * 4 + (0, 1, world.n_layers - 1, world.n_layers + 1, 65535))


def ranges_of(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[list[list[int]]]:
    """Of the number of layers that the same message names, mostly; also empty, inverted and many."""
    n_layers = so_far.get("n_layers", world.n_layers)
    n_layers = n_layers if isinstance(n_layers, int) and 0 < n_layers <= 65535 else world.n_layers
    ends = st.sampled_from((0, 1, n_layers // 3, n_layers // 2, n_layers - 1, n_layers))
    pair = st.tuples(ends, ends).map(sorted).filter(lambda each: each[0] < each[1]).map(list)
    whole = st.just([[0, n_layers]])
    wrong = st.sampled_from(([[5, 5]], [[n_layers, 0]], [[0, n_layers + 1]], [[65535, 65535]]))
    many = st.just([[at, at + 1] for at in range(0, min(n_layers, 512), 2)])
    same = pair.flatmap(lambda each: st.sampled_from((2, 256)).map(lambda n: [each] * n))
    return st.one_of(whole, whole, st.lists(pair, max_size=3), same, many, wrong)


def stages_of(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Pipelines that cover the model, mostly."""

    @st.composite
    def pipelines(draw: Draw) -> list[dict[str, Any]]:
        n_layers = draw(layer_counts(world))
        inner = draw(st.lists(st.integers(1, max(1, n_layers - 1)), max_size=4, unique=True))
        cuts = sorted({0, n_layers, *inner})
        # A message with one id that is none is refused as a whole: most have none.
        ids = node_ids(world) if draw(st.integers(0, 7)) == 0 else st.sampled_from(valid_ids(world))
        told = [{"node_id": draw(ids), "start": start, "end": end} for start, end in itertools.pairwise(cuts)]
        if not told or draw(st.integers(0, 9)) == 0:
            told = [{"node_id": draw(ids), "start": at, "end": at + 1} for at in range(255)]
        if draw(st.booleans()):
            told = [stage | {"commits": True} for stage in told]
        return told

    return pipelines()


def tokens(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[int]:
    return st.sampled_from((0, 1, 5, world.n_vocab - 1, world.n_vocab, 2**31 - 1))


def digests_of(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    return st.builds(bytes.__mul__, st.binary(min_size=32, max_size=32), st.sampled_from((0, 1, 2, 64, 1024)))


def bodies(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """What a record's envelope holds."""
    another = {"type": "NodeRecord", "node_id": world.honest_ids[0], "nickname": "I am you"}
    told = st.one_of(wire_values(swarm.NodeRecord, world), st.just(another)).map(
        lambda record: {INNER: record}
    )
    return st.one_of(told, told, st.sampled_from((b"", b"\x80")))


def stretch_digests_of(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """As many as the rows that the same message names have stretches, mostly; or none."""
    n_rows = so_far.get("n_rows", 1)
    n_bytes = 32 * -(-n_rows // 32) if isinstance(n_rows, int) and 0 < n_rows <= 4096 else 32
    return st.sampled_from((b"\0" * n_bytes, b"\xff" * n_bytes, b"\xff" * n_bytes, b"", b"\0" * 31))


def loads(world: World, so_far: Mapping[str, Any]) -> st.SearchStrategy[bytes]:
    """Numbers of a load that can be, and bytes that are none."""
    numbers = st.lists(st.sampled_from((0, 1, 8, 2**31, 2**53, 2**64 - 1, -1)), max_size=7)
    return st.one_of(numbers.map(msgspec.msgpack.encode), st.sampled_from((b"\xff", b"\x00" * 64)))


MEANINGS: Final[dict[str, Meaning]] = {
    "v": lambda world, _: st.sampled_from((1,) * 15 + (2,)),
    "node_id": lambda world, _: node_ids(world),
    "origin": lambda world, _: node_ids(world),
    "address": lambda world, _: addresses(world),
    "addresses": lambda world, _: st.lists(addresses(world), max_size=16),
    "data_addresses": lambda world, _: st.lists(addresses(world), max_size=16),
    "model_id": lambda world, _: model_ids(world),
    "placed_models": lambda world, _: st.lists(model_ids(world), max_size=3),
    "link": lambda world, _: st.one_of(model_ids(world), st.sampled_from(("", "x" * 128, "\u0000"))),
    "request_id": lambda world, _: st.sampled_from(
        world.request_ids * 6 + ("nobody's", "x" * 64, "\u0000", "a\nb")
    ),
    "resumes": lambda world, _: st.lists(st.sampled_from((*world.request_ids, "nobody's")), max_size=16),
    "n_layers": lambda world, _: layer_counts(world),
    "ranges": ranges_of,
    "loading": ranges_of,
    "pinned": ranges_of,
    "layers": ranges_of,
    "stages": stages_of,
    "token": tokens,
    "generated": lambda world, so_far: st.lists(tokens(world, so_far), max_size=4),
    "load": loads,
    "names": digests_of,
    "digests": digests_of,
    "stage": lambda world, _: st.sampled_from((0, 0, 1, 1, 2, 3, 255)),
    "until": lambda world, so_far: st.sampled_from(
        (so_far.get("stage", 0), *(so_far.get("stage", 0) + i for i in (1, 2)))
    ),
    "position": lambda world, _: st.sampled_from((0, 0, 1, 4, 8, 12, 24, 25, 26, 27, 32, 2**31 - 1)),
    "first_row": lambda world, _: st.sampled_from((0, 0, 0, 1, 63, 64, 2**31 - 1)),
    "n_rows": lambda world, _: st.sampled_from((1, 1, 2, 63, 64, 65, 65536)),
    "sent": stretch_digests_of,
    "received": stretch_digests_of,
    "index": lambda world, _: st.sampled_from((0, 1, 2, 3, 7, 8, 2**31 - 1)),
    "record": bodies,
    "kind": lambda world, _: st.sampled_from((*KINDS, *TEXTS)),
    "started_at": lambda world, _: st.sampled_from((0.0, 1.0, 1.7e9, 1e11)),
    "sequence": lambda world, _: st.sampled_from((0, 1, 2, 3, 2**53)),
    "started_at_ms": lambda world, _: st.sampled_from((0, 1, 1_700_000_000_000, 2**53)),
}
"""By a field's name. Another field goes by its type."""


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """With what its symbols stand for."""
    if isinstance(value, str):
        for symbol, name in names.items() if "@" in value else ():
            value = value.replace(symbol, name)
        return value
    if isinstance(value, dict):
        if value.keys() == {INNER}:
            return encoded(filled(value[INNER], names))
        return {filled(key, names): filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, names) for each in value]
    return value


def encoded(value: Any) -> bytes:
    """What no encoder of the project would write is written all the same."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, ValueError):
        return b"\xc1"


@cache
def _info(kind: Any) -> types.Type:
    return types.type_info(kind)


def wire_values(kind: Any, world: World) -> st.SearchStrategy[Any]:
    """What MessagePack makes of a message of this type: dicts, lists, numbers, text, bytes."""
    honest = _of_type(_info(kind), world)

    @st.composite
    def told(draw: Draw) -> Any:
        value = draw(honest)
        # Not one of the ends, which are drawn far more often.
        if draw(st.integers(1, TWISTED_ONE_IN)) == TWISTED_ONE_IN // 2:
            value = _twisted(value, draw)
        return value

    return told()


def _twisted(value: Any, draw: Draw) -> Any:
    """With one value in it replaced by one of another type, or beyond every limit."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value)))
        return value | {key: _twisted(value[key], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _twisted(value[at], draw), *value[at + 1 :]]
    return draw(st.sampled_from(WILD_NUMBERS if isinstance(value, int | float) else WILD))


def _of_type(kind: types.Type, world: World) -> st.SearchStrategy[Any]:
    match kind:
        case types.StructType():
            return _struct(kind, world)
        case types.BoolType():
            return st.booleans()
        case types.IntType():
            return st.sampled_from(_within(INTEGERS, kind))
        case types.FloatType():
            return st.sampled_from(_within(FLOATS, kind))
        case types.StrType():
            return _text(kind)
        case types.BytesType() | types.MemoryViewType():
            return _bytes(kind)
        case types.NoneType():
            return st.none()
        case types.LiteralType():
            return st.sampled_from(list(kind.values))
        case types.UnionType():
            return st.one_of([_of_type(each, world) for each in kind.types])
        case types.TupleType():
            return st.tuples(*[_of_type(each, world) for each in kind.item_types]).map(list)
        case types.VarTupleType() | types.ListType():
            return _sequence(kind, world)
        case types.DictType():
            return st.dictionaries(
                _of_type(kind.key_type, world), _of_type(kind.value_type, world), max_size=3
            )
    raise TypeError(f"no untruths are known of the type {kind}: extend bench/lying/untruths.py")


def _struct(kind: types.StructType, world: World) -> st.SearchStrategy[Any]:
    drawn = {each.name: None if _has_meaning(each) else _of_type(each.type, world) for each in kind.fields}

    @st.composite
    def struct(draw: Draw) -> Any:
        value: dict[str, Any] = {}
        for each in kind.fields:
            if not each.required and not kind.array_like and draw(st.integers(0, 2)) == 0:
                continue
            plain = drawn[each.name]
            value[each.encode_name] = draw(MEANINGS[each.name](world, value) if plain is None else plain)
        if kind.array_like:
            return [value[each.encode_name] for each in kind.fields]
        if kind.tag is not None and kind.tag_field is not None:
            return {kind.tag_field: kind.tag} | value
        return value

    return struct()


def _has_meaning(named: types.Field) -> bool:
    return named.name in MEANINGS and not isinstance(named.type, types.DictType)


def _within(values: tuple[Any, ...], kind: types.IntType | types.FloatType) -> list[Any]:
    low = -math.inf if kind.ge is None else kind.ge
    high = math.inf if kind.le is None else kind.le
    limits = [limit for limit in (kind.ge, kind.le) if limit is not None]
    number = type(values[0])
    found = [number(limit) for limit in limits] + [value for value in values if low <= value <= high]
    if low < 0:
        found += [-value for value in values if low <= -value]
    return found or [number(0)]


def _text(kind: types.StrType) -> st.SearchStrategy[str]:
    if kind.pattern is not None:
        # The only pattern on this wire: digests and model ids, 64 hex digits.
        return st.sampled_from(("0" * 64, "f" * 64, "ab" * 32))
    low, high = kind.min_length or 0, kind.max_length or 300
    fitting = [text for text in (*TEXTS, "y" * high) if low <= len(text) <= high]
    return st.sampled_from(fitting)


def _bytes(kind: types.BytesType | types.MemoryViewType) -> st.SearchStrategy[bytes]:
    low, high = kind.min_length or 0, kind.max_length or 300
    sizes = sorted({low, min(high, low + 1), min(high, 64), min(high, 4096), min(high, 2**20)})
    return st.builds(bytes.__mul__, st.sampled_from((b"\0", b"\xff", b"{")), st.sampled_from(sizes))


def _sequence(kind: types.VarTupleType | types.ListType, world: World) -> st.SearchStrategy[list[Any]]:
    items = _of_type(kind.item_type, world)
    low, high = kind.min_length or 0, kind.max_length or 64
    few = st.lists(items, min_size=low, max_size=max(low, min(high, 3)))
    same = items.map(lambda item: [item] * min(high, 256))
    return st.one_of(few, few, few, same)


# What goes along with a job.


def payloads(world: World) -> st.SearchStrategy[bytes]:
    """Rows and tokens of right and wrong shape; text that is none."""
    numbers = st.sampled_from((0.0, 1.0, 996.0, 1e30, -1e30, math.nan, math.inf, 1e-40))
    counts = st.sampled_from((1, 1, 1, 2, 4, 16, 0, 300))
    widths = st.sampled_from((world.n_embd,) * 5 + (world.n_embd - 1, 1, 0, 4 * world.n_embd))
    rows = st.builds(
        lambda n, width, value: _tensor(np.full((n, width), value, np.float32)), counts, widths, numbers
    )
    ids = st.sampled_from((0, 5, world.n_vocab, 2**31 - 1, -1))
    prompts = st.builds(lambda n, token: _tensor(np.full((n,), token, np.int32)), counts, ids)
    odd = st.sampled_from(
        (b"", b"text ", b"\xff\xfe", b"\0" * 4096, "\u202e\x1b[31m".encode(), b"x" * 70_000)
    )
    return st.one_of(rows, rows, rows, prompts, odd)


def _tensor(values: Any) -> bytes:
    return b"".join(bytes(piece) for piece in encode_tensor(values))


def drawn(strategy: st.SearchStrategy[Any], seed_: int, n: int) -> list[Any]:
    """At most `n` values (fewer where there are no more), the same for the same seed."""
    values: list[Any] = []

    alike = settings(database=None, deadline=None, derandomize=False, phases=[Phase.generate])

    @seed(seed_)
    @settings(alike, max_examples=n, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(value: Any) -> None:
        values.append(value)

    collect()
    return values
