"""A short-lived process that asks the default gateway, by UPnP, to forward ports to this machine.

    python -m swarmllm.swarm.discovery.gateway_process < QUESTION > ANSWER

What the gateway says is parsed by a library in C (miniupnpc) that blocks. Here it can be killed at its
deadline, has a limit of memory, and a fault in it costs this process and not the daemon. Nobody but the
gateway is spoken to: neither its answer to the search nor its description may name another host. Question and
answer are JSON (`Question`, `Answer`).
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from swarmllm.operating_system import default_gateway
from swarmllm.swarm.discovery import ssdp

ANSWER_MAX_BYTES = 4096
DESCRIPTION = "SwarmLLM"
OUTSIDE_MIN = 1024
LIFE_S = 25
_MEMORY_BYTES = 512 * 1024 * 1024
_TRIES = 3
_OTHER_PORTS = 7919
"""From a port that the gateway does not give to the next one that is tried."""
_NO_END = 0
"""As the time of a forwarding."""

Problem = Literal["", "no gateway", "no library", "no answer", "other host", "no address", "refused", "error"]


class Question(msgspec.Struct, frozen=True):
    op: Literal["map", "unmap"]
    ports: list[tuple[int, int]]
    """(port here, port outside)"""
    lease_s: int = 0


class Answer(msgspec.Struct, frozen=True):
    problem: Problem = ""
    """Why nothing was done; empty: it was."""
    external_ip: str = ""
    ports: list[tuple[int, int]] = []
    """(port here, port outside), as the gateway forwards them."""


def own_ip_towards(gateway: str) -> str:
    """Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((gateway, 9))
        ip: str = probe.getsockname()[0]
        return ip


def candidates(wanted: int) -> Iterator[int]:
    """The outer ports that are tried, one after the other."""
    for number in range(_TRIES):
        yield OUTSIDE_MIN + (wanted - OUTSIDE_MIN + number * _OTHER_PORTS) % (65536 - OUTSIDE_MIN)


def run(question: Question) -> Answer:
    """Raises OSError."""
    try:
        import miniupnpc
    except ImportError:
        return Answer("no library")
    gateway = default_gateway()
    if gateway is None:
        return Answer("no gateway")
    url = ssdp.description_url(gateway, own_ip_towards(gateway))
    if url is None:
        return Answer("no answer")
    upnp = miniupnpc.UPnP()
    control_url = _tried(upnp.selectigd, url)
    if not isinstance(control_url, str):
        return Answer("no answer")
    if not ssdp.is_at(control_url, gateway):
        return Answer("other host")
    if question.op == "unmap":
        for here, outside in question.ports:
            _unmap(upnp, here, outside)
        return Answer()
    return _mapped(upnp, question)


def _mapped(upnp: Any, question: Question) -> Answer:
    external_ip = _tried(upnp.externalipaddress)
    if not isinstance(external_ip, str):
        return Answer("no address")
    given: list[tuple[int, int]] = []
    for here, wanted in question.ports:
        outside = _port_for(upnp, here, wanted, question.lease_s)
        if outside is None:
            for each_here, each in given:
                _unmap(upnp, each_here, each)
            return Answer("refused", external_ip)
        given.append((here, outside))
    return Answer("", external_ip, given)


def _port_for(upnp: Any, here: int, wanted: int, lease_s: int) -> int | None:
    for outside in candidates(wanted):
        # Some gateways overwrite what another machine has had forwarded.
        if _forwarded(upnp, outside) not in (None, (upnp.lanaddr, here)):
            continue
        arguments = (outside, "TCP", upnp.lanaddr, here, DESCRIPTION, "")
        try:
            upnp.addportmapping(*arguments, lease_s)
        except Exception as error:  # the library raises Exception itself
            if "OnlyPermanentLeases" not in str(error) or not _tried(
                upnp.addportmapping, *arguments, _NO_END
            ):
                continue
        return outside
    return None


def _unmap(upnp: Any, here: int, outside: int) -> None:
    """What leads to this machine, also where only the port that was wanted is known and another one was
    given. The library does not tell "nothing there" from "the gateway does not say"."""
    for number, each in enumerate(candidates(outside)):
        where = _forwarded(upnp, each)
        if where == (upnp.lanaddr, here) or (where is None and number == 0):
            _tried(upnp.deleteportmapping, each, "TCP")


def _forwarded(upnp: Any, outside: int) -> tuple[str, int] | None:
    """Where the port leads."""
    found = _tried(upnp.getspecificportmapping, outside, "TCP")
    return (found[0], found[1]) if isinstance(found, tuple) and len(found) > 1 else None


def _tried(call: Any, *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception:  # the library raises Exception itself
        return None


def main() -> None:
    # Also where the daemon is gone: a gateway's answer may never end.
    signal.alarm(LIFE_S)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    question = msgspec.json.decode(sys.stdin.buffer.read(ANSWER_MAX_BYTES), type=Question)
    # What the library prints is no answer.
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = run(question)
    except OSError:
        answer = Answer("error")
    os.write(answers, msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
