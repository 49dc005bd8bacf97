"""Has some pictures of other nodes' encoders encoded again, behind all other work, and records the outcome.

The pictures are drawn by trust, as with layers, after their rows have come, so the encoding node cannot know
which. If this node has an encoder, its result decides. Otherwise other holders are asked, with ordinary
requests, and no node is accused before two of them agree. No client waits for a check.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.pictures import MediumName, name_of
from swarmllm.pipeline.check.checker import IDLE_WAIT_S, LOOK_S, NodeLoad
from swarmllm.pipeline.check.sampling import Chance, rate
from swarmllm.pipeline.check.verdict import Match
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.vision.asking import NoAnswer, PictureQuestion, ask
from swarmllm.pipeline.vision.choice import Encoder
from swarmllm.pipeline.vision.similarity import similarity
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm.swarm.router import Router
from swarmllm.workerpool.encoders import EncodedPicture, KeptPictures
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import ModelId, NodeId

log = logging.getLogger(__name__)

PENDING_MAX: Final = 2
"""Checks that wait for their turn; more are dropped. Each keeps a picture and its rows."""
HOLDERS_ASKED: Final = 3
"""Nodes that are asked to encode a picture again, until two agree."""
GIVEN_MAX: Final = 4096
"""Pictures of which it is known who encoded them."""


@dataclass(frozen=True, slots=True)
class _Pending:
    question: PictureQuestion
    encoded: EncodedPicture
    node_id: NodeId
    others: tuple[NodeId, ...]
    """That have the projector, too."""


@dataclass(slots=True)
class PictureChecker:
    compute: Compute
    router: Router
    budget: ByteBudget
    counts: PipelineStatistics
    trust: NodeTrust
    suspects: Suspects
    here: NodeLoad
    kept: KeptPictures
    """What a node gave is dropped from it when the node has lied."""
    base: float
    """The part of pictures of nodes of full trust that is checked."""
    chance: Chance = field(default_factory=lambda: random.SystemRandom().random)
    _given: OrderedDict[tuple[ModelId, str, str], NodeId] = field(default_factory=OrderedDict)
    _pending: deque[_Pending] = field(default_factory=deque)
    _has_work: trio.Event = field(default_factory=trio.Event)

    def came(
        self,
        question: PictureQuestion,
        encoded: EncodedPicture,
        node_id: NodeId,
        holders: Sequence[Encoder],
    ) -> None:
        """Rows came from that node."""
        key = question.key
        self._given[key] = node_id
        self._given.move_to_end(key)
        while len(self._given) > GIVEN_MAX:
            self._given.popitem(last=False)
        if len(self._pending) >= PENDING_MAX:
            return
        if self.chance() >= rate(self.trust.score(node_id), self.base):
            return
        able = [each for each in holders if each.path.node_id != node_id]
        able.sort(key=lambda each: (each.is_doubtful, -self.trust.score(each.path.node_id)))
        others = tuple(each.path.node_id for each in able[:HOLDERS_ASKED])
        self._pending.append(_Pending(question, encoded, node_id, others))
        self._has_work.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_work.wait()
            await self._quiet()
            pending = self._pending.popleft()
            if not self._pending:
                self._has_work = trio.Event()
            await self._check(pending)

    async def _quiet(self) -> None:
        for _ in range(int(IDLE_WAIT_S / LOOK_S)):
            if not self.here.is_busy():
                return
            await trio.sleep(LOOK_S)

    async def _check(self, pending: _Pending) -> None:
        question, node_id = pending.question, pending.node_id
        own = await self._own(question)
        if own is not None:
            self._charge(pending, await _similarity(own, pending.encoded, name_of(question.picture)))
            return
        against: list[tuple[NodeId, EncodedPicture]] = []
        for other in pending.others:
            try:
                again = await ask(self.router, self.budget, other, question)
            except NoAnswer as error:
                log.info("%s does not encode what a check asks for: %s", other, error)
                continue
            match = await _similarity(again, pending.encoded, name_of(question.picture))
            if match is not Match.WRONG:
                self._charge(pending, match)
                for liar, _ in against:
                    self._wrong(liar, "a picture: two others encoded it otherwise")
                return
            for _, earlier in against:
                if await _similarity(again, earlier, name_of(question.picture)) is not Match.WRONG:
                    self._charge(pending, Match.WRONG)
                    return
            against.append((other, again))
        if against:
            self._dispute(node_id, against[0][0])
        else:
            self.counts.checks_dropped += 1

    async def _own(self, question: PictureQuestion) -> EncodedPicture | None:
        projector = question.entry.projector
        if projector is None or projector.blake3 != question.projector:
            return None
        try:
            return await self.compute.encode_picture(
                ModelFile.of(question.entry), projector, question.picture, is_kept=False
            )
        except SwarmLLMError as error:
            log.info("this node does not encode what a check asks for: %s", error.message)
            return None

    def _charge(self, pending: _Pending, match: Match) -> None:
        if match is Match.WRONG:
            self._wrong(pending.node_id, "a picture: its rows are those of something else")
        else:
            self.counts.checked += 1
            self.trust.note(pending.node_id, TrustEvent.CHECKED, f"a picture: {match}")

    def _wrong(self, node_id: NodeId, detail: str) -> None:
        self.counts.checked += 1
        self.counts.checks_wrong += 1
        self.trust.note(node_id, TrustEvent.WRONG_RESULT, detail)
        self.suspects.doubt([node_id], trio.current_time())
        self._forget(node_id)

    def _dispute(self, node_id: NodeId, other: NodeId) -> None:
        """One of them lies: both lose a little."""
        self.counts.checked += 1
        self.counts.checks_disputed += 1
        pair = sorted((node_id, other))
        for each, with_ in zip(pair, reversed(pair), strict=True):
            self.trust.note(each, TrustEvent.DISPUTED, f"a picture: with {with_}")
        self.suspects.doubt(pair, trio.current_time())
        self._forget(node_id)

    def _forget(self, node_id: NodeId) -> None:
        """The next turn of a conversation has its pictures encoded again."""
        for key in [key for key, giver in self._given.items() if giver == node_id]:
            del self._given[key]
            self.kept.drop(key)


async def _similarity(one: EncodedPicture, other: EncodedPicture, medium: MediumName) -> Match:
    """It takes a while for megabytes."""
    return await trio.to_thread.run_sync(similarity, one, other, medium)
