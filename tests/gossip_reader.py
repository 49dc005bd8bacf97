"""Reads gossip in tests: `valid...` is passed on, and `take` gets what was. `valid|NODE|AUDIENCE` says who
has been told, in hexadecimal digits."""

from __future__ import annotations

from collections.abc import Callable

from swarmllm_proto.identifiers import NodeId


class ValidGossip:
    def __init__(self, take: Callable[[str, bytes], None] = lambda topic, content: None) -> None:
        self._take = take

    def validate(self, topic: str, content: bytes) -> bool | None:
        return content.startswith(b"valid")

    def author_and_audience(self, topic: str, content: bytes) -> tuple[NodeId, bytes] | None:
        _, *said = content.decode().split("|")
        return (NodeId(said[0]), bytes.fromhex(said[1])) if said else None

    def may_wait_s(self, topic: str, content: bytes) -> float:
        return 0.0

    def receive(self, topic: str, content: bytes) -> None:
        self._take(topic, content)
