"""Parses the identifiers in messages: node ids, multiaddrs, model ids and digests.

A value of these types was checked where it entered the process, and is in its canonical form: two that mean
the same are equal as text. They are `NewType`s over `str`, so they cost nothing as keys and in JSON, and mypy
refuses a plain `str` in their place. msgspec checks them while it decodes.

A node id is the base58btc form of a libp2p peer id that contains an Ed25519 public key: the identity
multihash (00 24) of the key's protobuf (08 01 12 20 and 32 bytes). Base58 digits are in ASCII order and all
these ids have 52 of them, so an id is valid exactly if it lies between the lowest and the highest one as
text. No number is ever computed from a stranger's text.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Final, NewType, TypeGuard

from msgspec import Meta

from swarmllm_proto.errors import BadMessage

BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
NODE_ID_SIZE: Final = 52
PEER_ID_BYTES: Final = 38
"""Of the multihash."""
NODE_ID_LOWEST: Final = "12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw"
NODE_ID_HIGHEST: Final = "12D3KooWT3gYEvLJyx1FyyHqrmvdy1tMjpgxmu9aSeKMEuafQtyC"
MULTIADDR_MAX: Final = 200
"""Characters. The longest form in use, IPv6 through a relay, has 130."""


def _digits_from(lowest: str) -> str:
    """A regular expression for base58 texts of the same length that are not below `lowest`."""
    if not lowest:
        return ""
    first, rest = lowest[0], lowest[1:]
    above = BASE58[BASE58.index(first) + 1 :]
    larger = f"|[{above}][{BASE58}]{{{len(rest)}}}" if above else ""
    return f"(?:{first}{_digits_from(rest)}{larger})"


def _digits_to(highest: str) -> str:
    """The same for texts that are not above `highest`."""
    if not highest:
        return ""
    last, rest = highest[0], highest[1:]
    below = BASE58[: BASE58.index(last)]
    smaller = f"|[{below}][{BASE58}]{{{len(rest)}}}" if below else ""
    return f"(?:{last}{_digits_to(rest)}{smaller})"


def _range_pattern(lowest: str, highest: str) -> str:
    n_common = next(at for at, (a, b) in enumerate(zip(lowest, highest, strict=True)) if a != b)
    low, high = lowest[n_common:], highest[n_common:]
    between = BASE58[BASE58.index(low[0]) + 1 : BASE58.index(high[0])]
    return (
        rf"\A{lowest[:n_common]}(?:{low[0]}{_digits_from(low[1:])}|{high[0]}{_digits_to(high[1:])}"
        rf"|[{between}][{BASE58}]{{{len(low) - 1}}})\Z"
    )


NODE_ID_PATTERN: Final = _range_pattern(NODE_ID_LOWEST, NODE_ID_HIGHEST)
HEX_DIGEST_PATTERN: Final = r"\A[0-9a-f]{64}\Z"
PUBLISHED_PATTERN: Final = (
    r"\A(?:hf:[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}"
    r":(?!.*\.\.)[A-Za-z0-9_.+][A-Za-z0-9_.+/-]{0,300}\.gguf)?\Z"
)

NodeId = NewType(
    "NodeId",
    Annotated[str, Meta(min_length=NODE_ID_SIZE, max_length=NODE_ID_SIZE, pattern=NODE_ID_PATTERN)],
)
ModelId = NewType("ModelId", Annotated[str, Meta(min_length=64, max_length=64, pattern=HEX_DIGEST_PATTERN)])
"""BLAKE3 of a model's manifest, in hexadecimal."""
Digest = NewType("Digest", Annotated[str, Meta(min_length=64, max_length=64, pattern=HEX_DIGEST_PATTERN)])
"""BLAKE3, in hexadecimal."""
PublishedName = NewType("PublishedName", Annotated[str, Meta(max_length=512, pattern=PUBLISHED_PATTERN)])
"""A file of a repository on a hub, `hf:ORG/REPO:FILE.gguf`; or empty: none."""
NOT_PUBLISHED: Final = PublishedName("")
Multiaddr = NewType("Multiaddr", Annotated[str, Meta(min_length=1, max_length=MULTIADDR_MAX)])
"""Protocols and their values, each of them checked by `require_multiaddrs`. Not every one can be dialled."""

Sign = Callable[[bytes], bytes]
"""With this node's key: content -> Ed25519 signature, 64 bytes."""
Verify = Callable[[NodeId, bytes, bytes], bool]
"""Whether a node signed this: (who, content, signature)."""

MEANINGS: Final = {
    NODE_ID_PATTERN: "is not a node id (base58 of an Ed25519 peer id, 12D3KooW and 44 characters)",
    HEX_DIGEST_PATTERN: "is not 64 hexadecimal digits",
    PUBLISHED_PATTERN: "is not hf:ORG/REPO:FILE.gguf",
}
"""Pattern -> what to say of a text that does not match it."""

_NODE_ID: Final = re.compile(NODE_ID_PATTERN)
_HEX_DIGEST: Final = re.compile(HEX_DIGEST_PATTERN)
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")
_DNS_NAME: Final = re.compile(
    r"(?=.{1,253}\Z)[0-9A-Za-z_](?:[0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?(?:\.[0-9A-Za-z_]"
    r"(?:[0-9A-Za-z_-]{0,61}[0-9A-Za-z_])?)*\.?"
)


def is_node_id(text: str) -> TypeGuard[NodeId]:
    return len(text) == NODE_ID_SIZE and _NODE_ID.match(text) is not None


def parse_node_id(text: str, field: str = "node_id") -> NodeId:
    """Raises BadMessage naming `field`."""
    if not is_node_id(text):
        raise BadMessage(field, MEANINGS[NODE_ID_PATTERN])
    return text


def is_model_id(text: str) -> TypeGuard[ModelId]:
    return _HEX_DIGEST.match(text) is not None


def parse_port(text: str) -> int:
    """1 to 65535, without sign, space or leading zero. Raises ValueError."""
    if _PORT.fullmatch(text) is None or int(text) > 65535:
        raise ValueError("is not a port")
    return int(text)


def is_dns_name(text: str) -> bool:
    """ASCII labels of 1 to 63 letters, digits, hyphens and underscores, 253 characters at most; a name in
    another alphabet is one in its xn-- form."""
    return _DNS_NAME.fullmatch(text) is not None


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Without a zone. Raises ValueError."""
    if "%" in text:
        raise ValueError("an address with a zone means something on one machine only")
    return ipaddress.ip_address(text)


def parse_multiaddr(text: str) -> Multiaddr:
    """Raises ValueError that says what is wrong, without quoting it."""
    if not 0 < len(text) <= MULTIADDR_MAX:
        raise ValueError(f"a multiaddr has 1 to {MULTIADDR_MAX} characters")
    start, *parts = text.split("/")
    if start or not parts:
        raise ValueError("a multiaddr begins with /")
    names = iter(parts)
    for name in names:
        if name in _WITHOUT_VALUE:
            continue
        is_valid = _WITH_VALUE.get(name)
        if is_valid is None:
            raise ValueError("a protocol of the multiaddr is not known")
        if not is_valid(next(names, "")):
            raise ValueError(f"the value of /{name} is not valid")
    return Multiaddr(text)


def usable_multiaddrs(texts: Iterable[str]) -> Iterator[Multiaddr]:
    """Those that are multiaddrs."""
    for text in texts:
        with suppress(ValueError):
            yield parse_multiaddr(text)


def require_multiaddrs(**fields: tuple[str, ...]) -> None:
    """For a message's `__post_init__`. Raises ValueError naming the field and the index."""
    for field, addresses in fields.items():
        for index, address in enumerate(addresses):
            try:
                parse_multiaddr(address)
            except ValueError as error:
                raise ValueError(f"field `{field}[{index}]`: {error}") from None


def _succeeds(parse: Callable[[str], object]) -> Callable[[str], bool]:
    def is_valid(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return is_valid


_WITH_VALUE: Final[dict[str, Callable[[str], bool]]] = {
    "ip4": lambda text: ":" not in text and _succeeds(parse_ip)(text),
    "ip6": lambda text: ":" in text and _succeeds(parse_ip)(text),
    "dns": is_dns_name,
    "dns4": is_dns_name,
    "dns6": is_dns_name,
    "dnsaddr": is_dns_name,
    "tcp": _succeeds(parse_port),
    "udp": _succeeds(parse_port),
    "p2p": is_node_id,
}
_WITHOUT_VALUE: Final = frozenset(
    {"noise", "p2p-circuit", "quic", "quic-v1", "tls", "webrtc-direct", "webtransport", "ws", "wss"}
)
