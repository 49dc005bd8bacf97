"""Has the default gateway forward this node's two ports, where it would else be out of reach (UPnP).

Only a node without a public IPv4 address does so, once a peer outside has tried its IPv4 addresses in vain: a
swarm in one local network opens nothing to the internet. The outer address that the gateway tells is
announced if it is public and the one at which that peer sees this node. Else another router stands before
the gateway, or the gateway names somebody else's address, and the forwarding is taken back. So it is where
peers then dial the outer address in vain. What is forwarded ends by itself after LEASE_S, and is renewed at
half of that. `gateway_process` talks to the gateway.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from subprocess import DEVNULL, PIPE
from typing import Protocol

import msgspec
import trio

from swarmllm.errors import InvalidRequest
from swarmllm.shared_ticks import sleep_until_tick
from swarmllm.swarm.discovery.addresses import Address, is_public
from swarmllm.swarm.discovery.gateway_process import (
    ANSWER_MAX_BYTES,
    LIFE_S,
    OUTSIDE_MIN,
    Answer,
    Problem,
    Question,
)
from swarmllm.swarm.router import PortMappingState, Reachability

log = logging.getLogger(__name__)

LEASE_S = 3600
LOOK_EVERY_S = 10.0
AGAIN_S = 1800.0
"""After a try in vain."""
RENEW_AGAIN_S = 300.0
"""After a renewal in vain, while the forwarding has not ended."""
DENIALS = 2
"""Peers that dial the outer address in vain, one after the other, before it is given up: one may lie."""
CHECKS = 8
"""Asked for besides the ordinary ones, where nobody has judged: peers may be of this network, or busy."""
STOP_S = 8.0
COMMAND = (sys.executable, "-P", "-m", "swarmllm.swarm.discovery.gateway_process")
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
_SAID: dict[Problem, str] = {
    "no gateway": "this machine has no default gateway",
    "no library": "the package miniupnpc is not installed",
    "no answer": "the gateway does not speak UPnP, or it is switched off there",
    "other host": "the gateway's UPnP description names another machine",
    "no address": "the gateway does not tell its outer address",
    "refused": "the gateway does not forward these ports",
    "error": "the gateway cannot be asked",
}


class Announcing(Protocol):
    """RecordSpread, as far as it is used here."""

    @property
    def plain_addresses(self) -> tuple[str, ...]:
        """Of the control port, without those that the gateway forwards, and without relays."""
        ...

    async def also_at(self, addresses: tuple[str, ...], data_addresses: tuple[str, ...]) -> None:
        """From now on these are announced, too, and no others besides this machine's own."""
        ...


class Checking(Protocol):
    """ReachabilityChecks, as far as it is used here."""

    @property
    def result(self) -> Reachability | None: ...

    async def check(self) -> bool: ...


class GatewayFailed(Exception):
    """The text says why."""


@dataclass(slots=True)
class Mapping:
    control: Address
    data: Address
    ports: list[tuple[int, int]]
    renew_at_s: float
    ends_at_s: float
    judged_at: float
    """When the last check was made that counts; of the checks' clock."""
    n_checks: int = 0
    """Besides the ordinary ones, since a peer has got through."""
    was_reached: bool = False
    n_denials: int = 0


def is_outside(found: Reachability | None) -> bool:
    """Whether the peer that tried sees this node at a public IPv4 address."""
    return found is not None and _is_public4(found.observed_ip)


def is_needed(found: Reachability | None, own: Collection[str]) -> bool:
    """`own`: this node's addresses, without forwarded ones."""
    if found is None or not is_outside(found) or any(map(_is_public4, map(_ip, own))):
        return False
    tried = [reached for text, reached in found.control if _is_ipv4(_ip(text))]
    return bool(tried) and not any(tried)


def mapped_addresses(answer: Answer, ports: Sequence[int], observed_ip: str) -> tuple[Address, Address]:
    """The outer addresses of the control and the data port. Raises GatewayFailed."""
    if answer.problem == "refused" and not _is_public4(answer.external_ip):
        raise GatewayFailed("double NAT: the gateway has no public address, and forwards nothing")
    if answer.problem:
        raise GatewayFailed(_SAID[answer.problem])
    if [here for here, _ in answer.ports] != list(ports):
        raise GatewayFailed("the gateway forwards other ports than it was asked for")
    if any(not OUTSIDE_MIN <= outside < 65536 for _, outside in answer.ports):
        raise GatewayFailed("the gateway forwards from ports that nobody asked for")
    if not _is_ipv4(answer.external_ip):
        raise GatewayFailed("the gateway's outer address is none")
    ip = answer.external_ip
    if not is_public(ip):
        raise GatewayFailed(f"double NAT: the gateway's own outer address, {ip}, is not public")
    if observed_ip != ip:
        raise GatewayFailed(f"double NAT: peers see this node at {observed_ip}, not at the gateway's {ip}")
    control, data = (Address(ip, outside) for _, outside in answer.ports)
    return control, data


class PortMapping:
    def __init__(
        self,
        announcing: Announcing,
        checks: Checking,
        ports: Callable[[], tuple[int, int]],
        ask: Callable[[Question], Awaitable[Answer]] | None = None,
    ) -> None:
        """`ports`: the control and the data port. `ask` raises GatewayFailed."""
        self._announcing = announcing
        self._checks = checks
        self._ports = ports
        self._ask = ask or ask_gateway
        self._mapping: Mapping | None = None
        self._asked_for: list[tuple[int, int]] = []
        self._again_at_s = 0.0
        self.state = PortMappingState("off")

    async def run(self) -> None:
        self.state = PortMappingState("idle")
        if self._mapping is not None:  # an earlier run has failed, and taken it back
            self._mapping = None
            await self._announcing.also_at((), ())
        try:
            while True:
                await self.look()
                await sleep_until_tick(LOOK_EVERY_S)
        finally:
            ports, self._asked_for = self._mapping.ports if self._mapping else self._asked_for, []
            if ports:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + STOP_S):
                    await self._take_back(ports)

    async def look(self) -> None:
        """Do what is to be done now."""
        now, mapping, found = trio.current_time(), self._mapping, self._checks.result
        if mapping is None:
            if now >= self._again_at_s and is_needed(found, self._announcing.plain_addresses):
                await self._map(now)
            return
        self._judge(mapping, found)
        if mapping.n_denials >= DENIALS:
            # The outer address has changed, or the router has forgotten.
            pause_s = 0.0 if mapping.was_reached else AGAIN_S
            why = f"peers could not dial {mapping.control}, which the gateway is to forward"
            await self._give_up(why, pause_s)
        elif now >= mapping.renew_at_s:
            await self._map(now)
        elif mapping.n_checks < CHECKS and (mapping.n_denials or not mapping.was_reached):
            await self._check(mapping)

    async def _check(self, mapping: Mapping) -> None:
        mapping.n_checks += 1
        await self._checks.check()
        self._judge(mapping, self._checks.result)

    def _judge(self, mapping: Mapping, found: Reachability | None) -> None:
        if found is None or found.checked_at <= mapping.judged_at or not is_outside(found):
            return
        # A peer that has an older envelope has not tried it.
        reached = dict(found.control).get(str(mapping.control))
        if reached is None:
            return
        mapping.judged_at = found.checked_at
        mapping.was_reached |= reached
        mapping.n_denials = 0 if reached else mapping.n_denials + 1
        if reached:
            mapping.n_checks = 0

    async def _map(self, now: float) -> None:
        ports, found, old = self._ports(), self._checks.result, self._mapping
        self._asked_for = old.ports if old is not None else [(port, port) for port in ports]
        answer: Answer | None = None
        try:
            answer = await self._ask(Question("map", self._asked_for, LEASE_S))
            # Who asks from inside sees another address; what an outside peer saw was compared before.
            observed_ip = found.observed_ip if found and is_outside(found) else old.control.ip if old else ""
            control, data = mapped_addresses(answer, ports, observed_ip)
        except GatewayFailed as failure:
            if old is not None and now < old.ends_at_s - RENEW_AGAIN_S:
                old.renew_at_s = now + RENEW_AGAIN_S
                log.info("forwarded ports are not renewed: %s", failure)
                return
            # Of a process that was killed nobody knows how far it got.
            await self._give_up(str(failure), AGAIN_S, self._asked_for if answer is None else answer.ports)
            return
        renew_at_s, ends_at_s = now + LEASE_S / 2, now + LEASE_S
        if old is not None and (old.control, old.data) == (control, data):
            old.renew_at_s, old.ends_at_s, old.ports = renew_at_s, ends_at_s, answer.ports
            return
        judged_at = found.checked_at if found else 0.0
        self._mapping = Mapping(control, data, answer.ports, renew_at_s, ends_at_s, judged_at)
        detail = f"the gateway forwards {control} and {data} to this node (UPnP)"
        self.state = PortMappingState("mapped", detail)
        log.info("ports are forwarded: %s", detail)
        await self._announcing.also_at((str(control),), (str(data),))
        await self._check(self._mapping)

    async def _give_up(self, why: str, pause_s: float, forwarded: Sequence[tuple[int, int]] = ()) -> None:
        mapping, self._mapping = self._mapping, None
        self._again_at_s = trio.current_time() + pause_s
        if why != self.state.detail:
            self.state = PortMappingState("failed", why)
            log.info("ports are not forwarded: %s", why)
        if mapping is not None:
            await self._announcing.also_at((), ())
        if ports := [*(mapping.ports if mapping is not None else forwarded)]:
            await self._take_back(ports)
        self._asked_for = []

    async def _take_back(self, ports: list[tuple[int, int]]) -> None:
        try:
            await self._ask(Question("unmap", ports))
        except GatewayFailed as failure:
            log.info("forwarded ports are left to their end: %s", failure)


def _ip(text: str) -> str:
    """Of an address; empty where it is none."""
    try:
        return Address.parse(text).ip
    except InvalidRequest:
        return ""


def _is_ipv4(ip: str) -> bool:
    try:
        return ipaddress.ip_address(ip).version == 4
    except ValueError:
        return False


def _is_public4(ip: str) -> bool:
    return _is_ipv4(ip) and is_public(ip)


async def ask_gateway(question: Question, command: Sequence[str] = COMMAND, life_s: float = LIFE_S) -> Answer:
    """Raises GatewayFailed."""
    # It parses what strangers write: it gets none of the daemon's secrets.
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        process = await trio.lowlevel.open_process(
            [*command], stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, start_new_session=True
        )
    except OSError as error:
        raise GatewayFailed(f"no process to ask the gateway with ({error.strerror})") from None
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = b""
        with trio.fail_after(life_s):
            await process.stdin.send_all(msgspec.json.encode(question))
            await process.stdin.aclose()
            while len(said) <= ANSWER_MAX_BYTES and (piece := await process.stdout.receive_some(4096)):
                said += piece
        if len(said) > ANSWER_MAX_BYTES:
            raise GatewayFailed("the gateway's answer is too long")
        return msgspec.json.decode(said, type=Answer)
    except trio.TooSlowError:
        raise GatewayFailed("the gateway takes too long to answer") from None
    except (OSError, trio.BrokenResourceError, msgspec.MsgspecError):
        raise GatewayFailed("the gateway's answer is unreadable") from None
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()
            await process.stdin.aclose()
