"""The daemon: starts all parts of a node in one nursery, and stops them in the reverse order.

From the bottom up: catalogue, router, worker pool, registry, pipelines, node, HTTP. They close in reverse,
because each only uses those before it; a stop is the cancellation of the whole. The first SIGINT or SIGTERM
lets the node finish its requests (`Node.drain`) before; the second stops at once, and so does the first while
the daemon starts. Any later one is left to Python's default and ends the process; workers notice by
themselves that their parent is gone.

`daemon.json` in the data folder tells other programs of this machine where the daemon listens (port 0 takes
any free one). It is written when HTTP answers and removed at the end; a daemon that was killed leaves it
behind, which is why it carries the pid.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import trio

from swarmllm import __version__
from swarmllm.api import open_api
from swarmllm.config import Config
from swarmllm.daemon_settings import (
    bootstrap_addresses,
    pipeline_settings,
    swarm_settings,
    transfer_settings,
    worker_settings,
)
from swarmllm.downloads import SharedDigests
from swarmllm.errors import SwarmLLMError
from swarmllm.keys import KeyFile
from swarmllm.log_output import set_up_logging
from swarmllm.loop_watchdog import LoopWatchdog
from swarmllm.models import Catalogue
from swarmllm.node import Node
from swarmllm.node.data_dir import (
    DOWNLOADS,
    open_catalogue,
    open_store,
    prepare_data_dir,
    when_free,
)
from swarmllm.node.placing.share_book import open_share_book
from swarmllm.node.remembered_loads import open_remembered_loads
from swarmllm.node.used_nodes import used_nodes
from swarmllm.pipeline.pipelines import Pipelines
from swarmllm.pipeline.stage.links import StageLinks
from swarmllm.reloading import reload_on_sighup
from swarmllm.scheduling.speeds import Observations
from swarmllm.sd_notify import ServiceManager
from swarmllm.supervision import Supervision, supervise, supervise_started
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.network_key import NetworkFile
from swarmllm.swarm.membership.signer import open_signer
from swarmllm.swarm.peers.directory import PeerDirectory
from swarmllm.swarm.peers.trust_keeper import Trust, open_trust
from swarmllm.swarm.records.registry import Registry, follow_router
from swarmllm.transfer import ModelTransfer
from swarmllm.workerpool import WorkerPool
from swarmllm_proto.identifiers import NodeId

if TYPE_CHECKING:
    from trio_typing import TaskStatus

log = logging.getLogger(__name__)

DAEMON_FILE = "daemon.json"
MACHINE_FILE = "machine.json"
OPEN_FILES = 65_536
STOP_S = 15.0
"""What a stop may take after the requests have ended."""


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of daemon.json."""

    pid: int
    version: str
    api_url: str
    node_id: NodeId
    addresses: tuple[str, ...]


def allow_many_open_files() -> None:
    """Every connection is an open file, and many systems let a process have 1024 unless it asks for more: so
    many connections would use up what databases and models need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class RunningNode(Protocol):
    """The interface of a node, or a bootstrap node, to the process that runs it."""

    def nickname_in_log(self, node_id: str) -> str: ...
    def model_name_in_log(self, model_id: str) -> str: ...

    async def drain(self, limit_s: float) -> None:
        """Finish what runs before the end, within `limit_s` seconds."""
        ...


Reread = Callable[[], Config] | None
"""Gets the configuration anew, for SIGHUP; None: SIGHUP is not handled. Blocks, raises ConfigError."""
Apply = Callable[[Config], Awaitable[None]]
"""Takes over what may change in a configuration. Raises ConfigError, InvalidRequest before it changes
anything."""
OpenNode = Callable[
    [Config, Reread, ServiceManager, Callable[[RunningNode], None]], AbstractAsyncContextManager[DaemonInfo]
]


async def run_daemon(
    config: Config,
    *,
    reread: Reread = None,
    on_serving: Callable[[DaemonInfo], None] = lambda daemon_info: None,
    open_node: OpenNode | None = None,
    task_status: TaskStatus[DaemonInfo] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until SIGINT, SIGTERM or cancellation; started when HTTP answers (models may still load), which
    `on_serving` is told too. `open_node`: what runs, see open_daemon.

    Raises ConfigError, and other SwarmLLMErrors for what keeps a daemon from running.
    """
    lines = set_up_logging(config)
    allow_many_open_files()
    manager = ServiceManager(os.environ)
    try:
        with Supervision().active():
            async with trio.open_nursery() as nursery:
                first_signal, nodes = trio.Event(), list[RunningNode]()
                await supervise_started(
                    nursery, "stop on signal", _stop_on_signal, nursery.cancel_scope, first_signal, nodes
                )
                opened = (open_node or open_daemon)(config, reread, manager, nodes.append)
                async with opened as daemon_info:
                    lines.nickname_of = nodes[0].nickname_in_log
                    lines.model_name_of = nodes[0].model_name_in_log
                    # What lives as long as the daemon need not be looked through between two tokens.
                    gc.collect()
                    gc.freeze()
                    on_serving(daemon_info)
                    task_status.started(daemon_info)
                    manager.tell(READY=1, STATUS=daemon_info.api_url)
                    supervise(nursery, "systemd watchdog", manager.feed_watchdog)
                    try:
                        await first_signal.wait()
                        limit_s = config.node.drain_timeout_s
                        manager.tell(STOPPING=1, EXTEND_TIMEOUT_USEC=int((limit_s + STOP_S) * 1e6))
                        await nodes[0].drain(limit_s)
                    finally:
                        manager.tell(STOPPING=1)
                # Not before: the HTTP server still writes the ends of answers.
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _only_cause(group) from group


@asynccontextmanager
async def open_daemon(
    config: Config,
    reread: Reread = None,
    manager: ServiceManager | None = None,
    on_open: Callable[[Node], None] = lambda node: None,
) -> AsyncIterator[DaemonInfo]:
    """A running daemon; leaving the block stops it. `on_open` gets its node.

    Raises ConfigError where folder or ports are taken.
    """
    data_dir = await trio.to_thread.run_sync(prepare_data_dir, config.data_dir)
    catalogue = await when_free(open_catalogue, data_dir)
    settings = swarm_settings(config, data_dir)
    watchdog = LoopWatchdog()
    directory = PeerDirectory()
    async with (
        open_trust(data_dir, settings.lists, directory.trust) as trust,
        open_libp2p_router(settings, trust, directory) as router,
        _open_rooms(config, data_dir, catalogue, router, trust, watchdog) as (daemon_info, apply, node),
        trio.open_nursery() as nursery,
    ):
        if reread is not None:
            await follow_sighup(nursery, config, reread, apply, manager)
        async with daemon_file(data_dir, daemon_info):
            # From here on, because imports at the start are slow steps that delay nobody.
            with watchdog.watching():
                on_open(node)
                yield daemon_info
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def daemon_file(data_dir: Path, daemon_info: DaemonInfo) -> AsyncIterator[None]:
    """Inside, daemon.json says where the daemon is. Whoever reads it may send signals."""
    file = data_dir / DAEMON_FILE
    await trio.to_thread.run_sync(_write_daemon_info, file, daemon_info)
    try:
        yield
    finally:
        log.info("node stops")
        file.unlink(missing_ok=True)


async def follow_sighup(
    nursery: trio.Nursery,
    config: Config,
    reread: Callable[[], Config],
    apply: Apply,
    manager: ServiceManager | None,
) -> None:
    manager = manager or ServiceManager({})
    await supervise_started(nursery, "reload on SIGHUP", reload_on_sighup, config, reread, apply, manager)


async def apply_to_swarm(config: Config, router: Libp2pRouter) -> None:
    """The part of a changed configuration that counts for every kind of node. Raises ConfigError,
    InvalidRequest."""
    addresses = await trio.to_thread.run_sync(bootstrap_addresses, config)
    if n_new := router.address_sources.read_again(addresses):
        log.warning("SIGHUP: %d more bootstrap addresses", n_new)
    logging.getLogger("swarmllm").setLevel(config.node.log_level.upper())


@asynccontextmanager
async def _open_rooms(
    config: Config,
    data_dir: Path,
    catalogue: Catalogue,
    router: Libp2pRouter,
    trust: Trust,
    watchdog: LoopWatchdog,
) -> AsyncIterator[tuple[DaemonInfo, Apply, Node]]:
    """Everything above the network, bottom up; yields also what takes over a configuration, and the node."""
    network = await trio.to_thread.run_sync(NetworkFile(data_dir).read)
    settings = worker_settings(config, data_dir, network)
    pool = WorkerPool(settings, data_dir / "run", on_change=lambda: node.holdings_changed())
    async with pool.running(), trio.open_nursery() as nursery:
        trust_min = config.inference.cross_node_prefix_trust_min
        registry = Registry(
            router.node_id,
            trust,
            trust_min,
            router.directory.registry,
        )
        await supervise_started(nursery, "registry", follow_router, registry, router)
        observations = Observations()
        remembered = await trio.to_thread.run_sync(open_remembered_loads, data_dir)
        transfer = ModelTransfer(
            router,
            registry,
            await when_free(open_store, data_dir, catalogue, config.store.quota_gib),
            transfer_settings(config),
            in_use=lambda: {*pool.models(), *(load.model_id for load in remembered.all())},
            on_change=lambda: node.holdings_changed(),
            note=trust.note,
            seeker=router.wide_area,
        )
        gathering = SharedDigests(data_dir / DOWNLOADS, router, transfer, may_believe=trust.may_work)
        await supervise_started(nursery, "digest gathering", gathering.run)
        known = {entry.name for entry in await trio.to_thread.run_sync(catalogue.list)}
        for name in config.inference.encrypted_models:
            if name not in known:
                log.warning("inference.encrypted_models: no model here has the name %s yet", name)
        # What a stage signs for are rows that its worker keeps.
        keeps_rows = config.inference.journal_max_mb > 0
        signer = await trio.to_thread.run_sync(open_signer, data_dir) if keeps_rows else None
        links = StageLinks(router.node_id, router, pool.ring) if config.network.direct_links else None
        pipelines = Pipelines(
            router,
            registry,
            pool,
            catalogue,
            router.node_id,
            pipeline_settings(config, network),
            pieces=transfer,
            digests=gathering,
            links=links,
            budget=router.budget,
            observations=observations,
            trust=trust,
            kept=pool,
            prefix_key=network.prefix_key,
            kept_pictures=pool.kept_pictures,
            signer=signer,
        )
        pool.on_notice = pipelines.on_notice
        router.prefer_untried(pipelines.needed)
        router.watch_while(pipelines.is_working)
        await supervise_started(nursery, "pipelines", pipelines.run)
        node = Node(
            config,
            router=router,
            registry=registry,
            pool=pool,
            catalogue=catalogue,
            pipelines=pipelines,
            transfer=transfer,
            gathering=gathering,
            observations=observations,
            trust=trust,
            remembered=remembered,
            watchdog=watchdog,
            book=await trio.to_thread.run_sync(open_share_book, data_dir),
            is_private=network.is_private,
        )
        router.want_details(partial(used_nodes, pipelines, pool, node.placing, registry))
        await supervise_started(nursery, "downloads", node.downloads.run)
        await supervise_started(nursery, "announcer", node.run)
        supervise(nursery, "speed probe", node.measure, data_dir / MACHINE_FILE)

        async def apply(changed: Config) -> None:
            await apply_to_swarm(changed, router)
            node.configure(changed)
            transfer.configure(transfer_settings(changed))

        async with open_api(node, config, KeyFile(data_dir)) as api_url:
            daemon_info = DaemonInfo(
                pid=os.getpid(),
                version=__version__,
                api_url=api_url,
                node_id=router.node_id,
                addresses=tuple(router.addresses),
            )
            log.info("node %s (%s) serves %s", node.nickname, node.node_id, api_url)
            supervise(nursery, "first loads", node.start)
            supervise(nursery, "repeated loads", node.keep_trying)
            supervise(nursery, "unused models", node.on_demand.run)
            supervise(nursery, "segment copies", node.tidy_copies)
            supervise(nursery, "placement", node.placing.run)
            supervise(nursery, "shared files", node.file_shares.run)
            yield daemon_info, apply, node
        nursery.cancel_scope.cancel()


def _write_daemon_info(file: Path, daemon_info: DaemonInfo) -> None:
    """In one step, so that a reader never sees half a file."""
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(daemon_info)) + b"\n")
    temporary.replace(file)


async def _stop_on_signal(
    scope: trio.CancelScope, first: trio.Event, nodes: list[RunningNode], *, task_status: TaskStatus[None]
) -> None:
    """The first signal sets `first` where there is a node already; the next cancels `scope`."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            log.info("signal received: %s", signal.Signals(number).name)
            if first.is_set() or not nodes:
                break
            first.set()
    scope.cancel()


def _only_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one SwarmLLMError in nested groups of one, or the group as it is."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, SwarmLLMError) else group
