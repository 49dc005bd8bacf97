"""Homes behind the usual kinds of NAT and firewall, in network namespaces: each home is one machine.

All of them share an internet (a bridge whose namespace routes), in which the address of a machine or a router
is 192.0.1.N and 2001:db8::N. Needs root, `ip` and `nft`, and miniupnpd for routers that forward ports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.common.namespaces import NoNamespaces

INTERNET = "192.0.1"
"""In no use anywhere. miniupnpd takes the networks for documentation (as 198.51.100) for private ones."""
LETS_IN_ANSWERS = """
  chain in { type filter hook input priority 0; policy accept; iifname "wan" ct state new drop; }
"""
ANSWERS_ONLY = f"""{LETS_IN_ANSWERS}
  chain through {{ type filter hook forward priority 0; policy drop;
    iifname "lan" accept; ct state established,related accept; ct status dnat accept; }}
"""
SOURCE = "chain out { type nat hook postrouting priority 100; "
KEEPS_THE_PORT = SOURCE + 'oifname "wan" masquerade; }'
ANOTHER_PORT_EACH_TIME = SOURCE + 'oifname "wan" masquerade fully-random; }'
ANOTHER_PORT_ONCE = (
    SOURCE
    + 'oifname "wan" tcp sport 8810 masquerade to :28810; oifname "wan" tcp sport 8811 masquerade to :28811; '
    + 'oifname "wan" ip protocol tcp masquerade to :30000-39999; oifname "wan" masquerade; }'
)
FULL_CONE = """
  set used { type inet_service; flags dynamic,timeout; timeout 5m; }
  chain out { type nat hook postrouting priority 100;
    oifname "wan" update @used { tcp sport } masquerade; oifname "wan" masquerade; }
  chain inward { type nat hook prerouting priority -100; iifname "wan" tcp dport @used dnat to HOME; }
"""
"""Whoever is outside may use a port from which something inside has spoken to anybody."""
UPNP_CHAINS = """
table inet filter {
  chain forward { type filter hook forward priority 0; policy accept; jump miniupnpd; }
  chain miniupnpd { }
}
table inet nat {
  chain prerouting { type nat hook prerouting priority -100; policy accept; jump prerouting_miniupnpd; }
  chain postrouting { type nat hook postrouting priority 100; policy accept; jump postrouting_miniupnpd; }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
}
"""
UPNP_SETTINGS = """
ext_ifname=wan
listening_ip=lan
port=0
enable_natpmp=no
enable_upnp=yes
secure_mode=yes
upnp_table_name=filter
upnp_nat_table_name=nat
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 0.0.0.0/0 1024-65535
"""


@dataclass(frozen=True)
class Kind:
    """What stands between one home and the internet."""

    name: str
    routers: tuple[str, ...] = ()
    """What the routers' nftables say of IPv4, the outermost first. None: the machine itself is outside."""
    has_ipv4: bool = True
    has_ipv6: bool = False
    """With an address of its own, which the innermost router lets in only answers to."""
    is_firewalled: bool = False
    """A machine that is outside lets in only answers."""
    maps_ports: bool = False
    """The innermost router forwards ports where it is asked to by UPnP."""


KINDS = (
    Kind("open"),
    Kind("firewall", is_firewalled=True),
    Kind("full cone", (FULL_CONE,)),
    Kind("port-restricted", (KEEPS_THE_PORT,)),
    Kind("symmetric", (ANOTHER_PORT_EACH_TIME,)),
    Kind("carrier-grade", (ANOTHER_PORT_ONCE, KEEPS_THE_PORT)),
    Kind("double", (KEEPS_THE_PORT, KEEPS_THE_PORT)),
    Kind("symmetric and IPv6", (ANOTHER_PORT_EACH_TIME,), has_ipv6=True),
    Kind("IPv6 only", ("",), has_ipv4=False, has_ipv6=True),
    Kind("port-restricted, UPnP", (KEEPS_THE_PORT,), maps_ports=True),
    Kind("symmetric, UPnP", (ANOTHER_PORT_EACH_TIME,), maps_ports=True),
)
"""`port-restricted`: as Linux and most routers at home do it, a connection keeps its source port.
`carrier-grade`: a provider's NAT, which gives each port inside another one outside and stays with it,
before a router at home."""


def kind_named(name: str) -> Kind:
    """Raises KeyError."""
    return {kind.name: kind for kind in KINDS}[name]


class _Batch:
    """Commands of `ip` for one namespace, run as one."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._lines: list[str] = []

    def __call__(self, line: str) -> None:
        self._lines.append(line)

    def run(self) -> None:
        sh("ip", "-n", self.namespace, "-batch", "-", given="\n".join(self._lines))
        self._lines.clear()


def sh(*command: str, given: str = "") -> None:
    subprocess.run(command, input=given.encode(), check=True, capture_output=True, timeout=60)


def can_map_ports() -> bool:
    """Whether there is what routers forward ports with."""
    return shutil.which("miniupnpd") is not None


@contextmanager
def homes(kinds: Sequence[Kind]) -> Iterator[list[str]]:
    """The namespace of the home of each kind, one after the other, and at the end that of a machine on the
    open internet with both families. Raises NoNamespaces."""
    made: list[str] = []
    daemons: list[subprocess.Popen[bytes]] = []
    stack = ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    prefix = f"nat{os.getpid()}"

    def namespace(name: str) -> str:
        full = f"{prefix}-{name}"
        sh("ip", "netns", "add", full)
        made.append(full)
        sh("ip", "-n", full, "link", "set", "lo", "up")
        return full

    try:
        try:
            internet = _internet(namespace("internet"))
            found = []
            for number, kind in enumerate(kinds, 1):
                inner = [namespace(f"{number}-{depth}") for depth in range(len(kind.routers))]
                home = namespace(f"{number}-home")
                _connect(internet, number, kind, inner, home)
                found.append(home)
                if kind.maps_ports:
                    daemons.append(_forward_on_request(inner[-1], folder))
            meeting = namespace("meeting")
            _connect(internet, len(kinds) + 1, Kind("meeting", has_ipv6=True), [], meeting)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", b"") or str(error).encode()
            raise NoNamespaces(said.decode().strip()) from error
        yield [*found, meeting]
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        stack.close()
        for each in reversed(made):
            subprocess.run(["ip", "netns", "del", each], check=False, capture_output=True, timeout=30)


def _internet(namespace: str) -> str:
    batch = _Batch(namespace)
    batch("link add bridge type bridge")
    batch("link set bridge up")
    batch(f"addr add {INTERNET}.254/24 dev bridge")
    batch("addr add 2001:db8::ffff/64 dev bridge nodad")
    batch.run()
    _forward(namespace)
    return namespace


def _forward(namespace: str) -> None:
    keys = ("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
    sh("ip", "netns", "exec", namespace, "sysctl", "-qw", *keys)


def _forward_on_request(router: str, folder: Path) -> subprocess.Popen[bytes]:
    sh("ip", "netns", "exec", router, "nft", "-f", "-", given=UPNP_CHAINS)
    settings = folder / f"{router}.conf"
    settings.write_text(UPNP_SETTINGS)
    # In the foreground, so that it can be ended.
    daemon = ("miniupnpd", "-d", "-f", str(settings), "-P", str(folder / f"{router}.pid"))
    command = ["ip", "netns", "exec", router, *daemon]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _connect(internet: str, number: int, kind: Kind, routers: list[str], home: str) -> None:
    """From the internet over the routers, the outermost first, to the machine at home."""
    outermost = routers[0] if routers else home
    batch = _Batch(internet)
    batch(f"link add port{number} type veth peer name wan netns {outermost}")
    batch(f"link set port{number} master bridge up")
    if kind.has_ipv6 and routers:
        batch(f"route add 2001:db8:{number:x}::/48 via 2001:db8::{number:x}")
    batch.run()
    batch = _Batch(outermost)
    if kind.has_ipv4:
        batch(f"addr add {INTERNET}.{number}/24 dev wan")
    if kind.has_ipv6:
        batch(f"addr add 2001:db8::{number:x}/64 dev wan nodad")
    batch("link set wan up")
    if kind.has_ipv4:
        batch(f"route add default via {INTERNET}.254")
    if kind.has_ipv6:
        batch("route add default via 2001:db8::ffff")
    batch.run()
    for depth, router in enumerate(routers):
        inner = routers[depth + 1] if depth + 1 < len(routers) else home
        _lan(router, inner, number, depth, kind)
        rules = kind.routers[depth].replace("HOME", _inside_ip(number, depth, kind))
        tables = f"table ip nat {{ {rules}\n{ANSWERS_ONLY} }}\ntable ip6 filter {{ {ANSWERS_ONLY} }}\n"
        sh("ip", "netns", "exec", router, "nft", "-f", "-", given=tables)
        _forward(router)
    if kind.is_firewalled:
        sh(
            "ip",
            "netns",
            "exec",
            home,
            "nft",
            "-f",
            "-",
            given=f"table inet filter {{ {LETS_IN_ANSWERS} }}\n",
        )


def _inside_ip(number: int, depth: int, kind: Kind) -> str:
    """Of what hangs behind a router: between two routers are other addresses than at home."""
    return f"192.168.{number}.2" if depth == len(kind.routers) - 1 else f"100.64.{number}.2"


def _lan(router: str, inner: str, number: int, depth: int, kind: Kind) -> None:
    inside = _inside_ip(number, depth, kind)
    gateway = inside.rpartition(".")[0] + ".1"
    batch = _Batch(router)
    batch(f"link add lan type veth peer name wan netns {inner}")
    batch("link set lan up")
    if kind.has_ipv4:
        batch(f"addr add {gateway}/24 dev lan")
    if kind.has_ipv6:
        batch(f"addr add 2001:db8:{number:x}::1/64 dev lan nodad")
    batch.run()
    batch = _Batch(inner)
    batch("link set wan up")
    if kind.has_ipv4:
        batch(f"addr add {inside}/24 dev wan")
        batch(f"route add default via {gateway}")
    if kind.has_ipv6:
        batch(f"addr add 2001:db8:{number:x}::2/64 dev wan nodad")
        batch(f"route add default via 2001:db8:{number:x}::1")
    batch.run()
