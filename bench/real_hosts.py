"""Two hundred libp2p hosts on one machine: until all reach all, and what happens when something happens.

    python -m bench.real_hosts [--hosts 200] [--scenes started newcomer killed halves ...]

The hosts are those of the product, in a few processes and two network namespaces (which needs root; without
them the scene `halves` is left out, and all are on loopback). They know the address of the first one. The
scenes come one after the other. Times are those of the clock; beside them stand the seconds of the processor
that all hosts together used, because two hundred hosts share what two hundred machines have for themselves.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from bench.common.host_parts import N_LISTENERS, Look, Messages, part_processes
from bench.common.host_swarm import Swarm, all_know, shared_out, told
from bench.common.namespaces import NoNamespaces, cabled_namespaces, ip
from swarmllm.swarm.discovery.dialler import PEERS_MAX
from swarmllm.swarm.records.spread import heartbeat_interval_s

PARTED_S = 60.0
SETTLE_S = 75.0
"""Connections rest after a minute without a message."""
QUIET_S = 60.0
CLOCKS_WRONG_H = (-12.0, 5.0, 11.0)

Row = tuple[str, str]


def started(swarm: Swarm, n_hosts: int) -> list[Row]:
    began_s = time.monotonic()
    # The first has more to do than all others, who know nobody else. In life it has a machine of its own; in
    # one process with half of them, each step of it would wait for a hundred others.
    first, *parts = (swarm.part() for _ in range(3))
    swarm.start({first: ["host0"]} | shared_out([f"host{n}" for n in range(1, n_hosts)], parts))
    listening_s = time.monotonic() - began_s
    print(f"  all listen after {listening_s:.1f} s", file=sys.stderr)
    wall_s, _ = swarm.until(all_know)
    look = swarm.look()
    degree = sum(look.degrees) / n_hosts
    return [
        (
            f"{n_hosts} start at once and know the first one: until all reach all",
            f"{listening_s + wall_s:.1f} s",
        ),
        ("of the processor until then, all together", f"{look.processor_s:.0f} s"),
        ("connections of each", f"{degree:.1f} (most: {max(look.degrees)})"),
        ("memory of each", f"{look.resident_mib / n_hosts:.1f} MiB"),
    ]


def newcomer(swarm: Swarm) -> list[Row]:
    """It asks a node that it is not connected with, as a request that is planned over it would."""
    part, rng = swarm.part(), random.Random(1)
    began_s = time.monotonic()
    swarm.start({part: ["newcomer"]})
    everybody = {known.node_id for name, (_, known) in swarm.hosts.items() if name != "newcomer"}
    while missing := everybody - part.do("knows", "newcomer"):
        time.sleep(0.05)
        if time.monotonic() - began_s > 60.0:
            raise TimeoutError(f"the newcomer does not reach {len(missing)}")
    routes_s = time.monotonic() - began_s
    stranger = rng.choice(sorted(everybody - part.do("connected", "newcomer")) or sorted(everybody))
    asked_s = part.do("ask", "newcomer", stranger)
    known_s = swarm.until(all_know)[0]
    answered = "none" if asked_s is None else f"{asked_s:.2f} s"
    return [
        ("one more: from its start until it reaches all, with their records", f"{routes_s:.2f} s"),
        ("then, answer of a node that it was not connected with", answered),
        ("until all reach it", f"{routes_s + known_s:.1f} s"),
    ]


def killed(swarm: Swarm) -> list[Row]:
    """`newcomer` runs alone in its process. It has just been used by some, and is known to all."""
    part, known = swarm.hosts["newcomer"]
    users = [name for name in swarm.hosts if name != "newcomer"][:8]
    for name in users:
        swarm.hosts[name][0].do("ask", name, known.node_id)
    swarm.kill(part)
    began_s = time.monotonic()
    while True:
        counting = {name for found in swarm.everywhere("reaching", known.node_id) for name in found}
        passed_s = time.monotonic() - began_s
        if counting.isdisjoint(users) or passed_s > 30.0:
            break
        time.sleep(0.05)
    others = sorted(counting)[:8]
    tried = [swarm.hosts[name][0].do("ask", name, known.node_id) is None for name in others]
    began_s = time.monotonic()
    left = {name for found in swarm.everywhere("reaching", known.node_id) for name in found}
    return [
        (
            f"a node that {len(users)} work with is killed: until none of them plans over it",
            f"{passed_s:.2f} s",
        ),
        ("others, never connected with it, that count it then", f"{len(counting)} of {len(swarm.hosts)}"),
        (
            f"of {len(others)} of those that ask it: fail, and count it then",
            f"{sum(tried)}, {len(left.intersection(others))}",
        ),
    ]


def quiet(swarm: Swarm, heartbeats_of: int) -> list[Row]:
    """Nobody comes or goes, and nobody asks for anything. `heartbeats_of`: so many nodes send heartbeats as
    often, all together, as these hosts shall; 0: as they do."""
    if heartbeats_of:
        interval_s = len(swarm.hosts) * heartbeat_interval_s(heartbeats_of, 8) / heartbeats_of
        swarm.everywhere("beat_every", interval_s)
    time.sleep(SETTLE_S)
    first = swarm.parts[0]
    before, received, began_s = swarm.look(), swarm.n_bytes(), time.monotonic()
    alone_s = first.do("look").processor_s
    time.sleep(QUIET_S)
    after, passed_s = swarm.look(), time.monotonic() - began_s
    alone = first.do("look")
    n_bytes, n_hosts = swarm.n_bytes() - received, len(swarm.hosts)
    percent = 100 * (after.processor_s - before.processor_s) / passed_s / n_hosts
    return [
        (
            f"nothing happens for {passed_s:.0f} s"
            + f", with the heartbeats of {heartbeats_of} nodes" * bool(heartbeats_of)
            + ": each takes of a core",
            f"{percent:.2f} %",
        ),
        ("each receives, with all headers", f"{n_bytes / n_hosts / passed_s / 1000:.2f} kB/s"),
        ("connections of each", f"{sum(after.degrees) / n_hosts:.1f}"),
        (
            f"the first one, with {alone.degrees[0]} connections: of a core",
            f"{100 * (alone.processor_s - alone_s) / passed_s:.2f} %",
        ),
    ]


def halves(swarm: Swarm, isolate: Callable[[bool], None]) -> list[Row]:
    """Nothing passes from one namespace to the other."""
    isolate(True)
    time.sleep(PARTED_S / 2)
    for number, name in enumerate(list(swarm.hosts)[::4]):
        swarm.publish(name, f"half {number}")
    time.sleep(PARTED_S / 2)
    apart = swarm.look().n_lacking / len(swarm.hosts)
    isolate(False)
    wall_s, processor_s = swarm.until(all_know)
    return [
        (f"two halves for {PARTED_S:.0f} s: each lacks of the others, or does not reach", f"{apart:.0f}"),
        (
            "from then on until all reach all and know what was said meanwhile",
            f"{wall_s:.1f} s, {processor_s:.0f} s of the processor",
        ),
    ]


def crowd(swarm: Swarm, n_more: int) -> list[Row]:
    began_s, before = time.monotonic(), swarm.look()
    swarm.start(shared_out([f"crowd{n}" for n in range(n_more)], [swarm.part() for _ in range(2)]))
    listening_s = time.monotonic() - began_s
    wall_s, _ = swarm.until(all_know)
    look = swarm.look()
    return [
        (f"{n_more} come at once: until all listen", f"{listening_s:.1f} s"),
        ("until all reach all", f"{listening_s + wall_s:.1f} s"),
        ("of the processor until then, all together", f"{look.processor_s - before.processor_s:.0f} s"),
        ("connections of the node with most", f"{max(look.degrees)}"),
    ]


def half_dies(swarm: Swarm) -> list[Row]:
    """Every second process."""
    n_before = len(swarm.hosts)
    for part in swarm.parts[1::2]:
        swarm.kill(part)
    n_dead = n_before - len(swarm.hosts)
    time.sleep(5.0)
    soon = swarm.look()
    swarm.publish(list(swarm.hosts)[-1], "half of us are left")
    wall_s, processor_s = swarm.until(all_know)
    time.sleep(30.0)
    later = swarm.look()
    n_left = len(swarm.hosts)
    return [
        (
            f"{n_dead} of {n_before} are killed at once: of them each counts 5 s later",
            f"{soon.n_dead / n_left:.1f}",
        ),
        (
            "until news of one that is left has reached all that are left",
            f"{wall_s:.1f} s, {processor_s:.0f} s of the processor",
        ),
        ("of the dead each counts 30 s after that", f"{later.n_dead / n_left:.1f}"),
        ("connections of each then", f"{sum(later.degrees) / n_left:.1f}"),
    ]


def clocks(swarm: Swarm, n_each: int) -> list[Row]:
    rows: list[Row] = []
    parts = {swarm.part(3600 * wrong_h): wrong_h for wrong_h in CLOCKS_WRONG_H}
    swarm.start({part: [f"{wrong_h:+g}h{n}" for n in range(n_each)] for part, wrong_h in parts.items()})
    wall_s, _ = swarm.until(all_know)
    wrong = ", ".join(f"{wrong_h:+g}" for wrong_h in CLOCKS_WRONG_H)
    rows.append(
        (
            f"{len(parts) * n_each} come, their clocks wrong by {wrong} h: until all reach all",
            f"{wall_s:.1f} s",
        )
    )
    for part in parts:
        swarm.publish(swarm.names(part)[0], "what time is it?")
    wall_s, _ = swarm.until(all_know)
    rows.append(("until news of one of each has reached all", f"{wall_s:.1f} s"))
    for part in parts:
        for name in swarm.names(part)[:1]:
            swarm.stop(name)
            swarm.start({part: [name]})
    wall_s, _ = swarm.until(all_know)
    rows.append(("one of each starts again: until all reach all", f"{wall_s:.1f} s"))
    return rows


def churn(swarm: Swarm, minutes: float, n_moving: int, every_s: float) -> list[Row]:
    """One after the other of `n_moving`, each in a process of its own, is killed or leaves, and comes again.
    The others send to each other."""
    rng = random.Random(1)
    moving = [f"moving{n}" for n in range(n_moving)]
    swarm.start({swarm.part(): [name] for name in moving})
    staying = [name for name in swarm.hosts if name not in moving]
    swarm.until(all_know)
    node_ids = {name: swarm.hosts[name][1].node_id for name in staying}
    for part in swarm.parts:
        own = [name for name in swarm.names(part) if name in node_ids]
        listeners = {
            name: rng.sample([node_ids[other] for other in staying if other != name], N_LISTENERS)
            for name in own
        }
        if own:
            part.do("send", listeners)
    stayers = [part for part in swarm.parts if node_ids.keys() & set(swarm.names(part))]
    time.sleep(30.0)
    before = [part.do("look") for part in stayers]
    middle = before
    began_s, n_changes, n_lacking = time.monotonic(), 0, [0]
    while (passed_s := time.monotonic() - began_s) < minutes * 60:
        name = rng.choice(moving)
        if name not in swarm.hosts:
            swarm.start({swarm.part(): [name]})
        elif rng.random() < 0.5:
            swarm.kill(swarm.hosts[name][0])
        else:
            part = swarm.hosts[name][0]
            swarm.stop(name)
            swarm.kill(part)
        n_changes += 1
        time.sleep(every_s * rng.uniform(0.5, 1.5))
        if middle is before and passed_s > minutes * 30:
            middle = [part.do("look") for part in stayers]
        if n_changes % 10 == 0:
            n_lacking.append(swarm.look().n_lacking)
            print(f"  {passed_s:.0f} s: {told(swarm.look())}", file=sys.stderr, flush=True)
    for part in stayers:
        part.do("end_sending")
    settled_s, _ = swarm.until(all_know)
    time.sleep(30.0)
    after = [part.do("look") for part in stayers]
    total = Messages()
    for part in stayers:
        found = part.do("messages")
        total.sent += found.sent
        total.received += found.received
        total.n_missed += found.n_missed
        total.n_refused += found.n_refused
    n_sent, n_lost = sum(total.sent.values()), sum((total.sent - total.received).values())

    def each(looks: Sequence[Look], what: str) -> str:
        return f"{sum(getattr(look, what) for look in looks) / len(staying):.1f}"

    return [
        (
            f"{n_moving} of {n_moving + len(staying)} come and go for {minutes:g} minutes: changes",
            f"{n_changes}",
        ),
        (
            "messages of those that stay: sent, lost, out of turn, refused",
            f"{n_sent}, {n_lost}, {total.n_missed}, {total.n_refused}",
        ),
        (
            "pairs of which one lacked news of the other, at most, while they came and went",
            f"{max(n_lacking)}",
        ),
        ("after the last change, until all reach all", f"{settled_s:.1f} s"),
        (
            "memory of each of those that stay before, in the middle and after, MiB",
            ", ".join(each(looks, "resident_mib") for looks in (before, middle, after)),
        ),
        (
            "tasks of each before, in the middle and after",
            ", ".join(each(looks, "n_tasks") for looks in (before, middle, after)),
        ),
        (
            "open files of each before, in the middle and after",
            ", ".join(each(looks, "n_files") for looks in (before, middle, after)),
        ),
    ]


SCENES = ("started", "newcomer", "killed", "quiet", "halves", "crowd", "half_dies", "clocks", "churn")


@contextmanager
def namespaces() -> Iterator[tuple[list[str], Callable[[bool], None]]]:
    """(two namespaces, how to part them); no namespaces where there can be none."""
    with ExitStack() as stack:
        try:
            made = list(stack.enter_context(cabled_namespaces(["one", "two"])).values())
        except NoNamespaces as error:
            print(f"on loopback, without the scene `halves`: {error}", file=sys.stderr)
            yield [], lambda are_parted: None
            return
        switch = made[0].removesuffix("one") + "switch"

        def isolate(are_parted: bool) -> None:
            state = "on" if are_parted else "off"
            for port in ("port1", "port2"):
                ip("-n", switch, "link", "set", port, "type", "bridge_slave", "isolated", state)

        yield made, isolate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=200)
    parser.add_argument("--scenes", nargs="*", choices=SCENES, default=SCENES)
    parser.add_argument("--peers", type=int, default=PEERS_MAX)
    parser.add_argument("--crowd", type=int, default=100)
    parser.add_argument(
        "--heartbeats-of",
        type=int,
        default=0,
        help="in a quiet minute, nodes (0: --hosts)",
    )
    parser.add_argument("--churn-minutes", type=float, default=8.0)
    parser.add_argument("--change-every-s", type=float, default=4.0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        namespaces() as (inside, isolate),
        part_processes() as make,
    ):
        swarm = Swarm(make, Path(folder), inside, options.peers)
        scenes: dict[str, Callable[[], list[Row]]] = {
            "started": partial(started, swarm, options.hosts),
            "newcomer": partial(newcomer, swarm),
            "killed": partial(killed, swarm),
            "quiet": partial(quiet, swarm, options.heartbeats_of),
            "halves": partial(halves, swarm, isolate),
            "crowd": partial(crowd, swarm, options.crowd),
            "half_dies": partial(half_dies, swarm),
            "clocks": partial(clocks, swarm, 4),
            "churn": partial(churn, swarm, options.churn_minutes, options.hosts // 2, options.change_every_s),
        }
        print("| what happens | figure |\n|---|---|", flush=True)
        for name in options.scenes:
            if name == "halves" and not inside:
                continue
            for what, figure in scenes[name]():
                print(f"| {what} | {figure} |", flush=True)


if __name__ == "__main__":
    main()
