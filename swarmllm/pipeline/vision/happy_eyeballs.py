"""Sends a picture to holders of a projector until one of them has encoded it (`race.py` decides to which and
when).

A picture that an encoder calls damaged, or that ends its process, is sent to one more node and then refused.
A node that is overtaken gets a cancellation, and keeps nothing of the picture.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from swarmllm.errors import InvalidRequest, VisionEncoderUnavailable
from swarmllm.log_filter import provoked_by
from swarmllm.pictures import MediumName, name_of
from swarmllm.pipeline.prefix.choice import AvoidedPeers
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.vision.asking import NoAnswer, PictureQuestion, ask
from swarmllm.pipeline.vision.choice import TRIED_MAX, Encoder
from swarmllm.pipeline.vision.race import EncodingTimes, Race, Runner
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.peers.trust import NodeTrust, TrustEvent
from swarmllm.swarm.router import Router
from swarmllm.workerpool.encoders import EncodedPicture
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

REFUSALS_MAX: Final = 2
"""Encoders that may refuse a picture, or end over it, before it is the picture's fault."""
_Outcome = tuple[NodeId, EncodedPicture | NoAnswer]


class EncodersGone(Exception):
    """No node that has this projector gives rows. `is_busy`: some have no place now."""

    def __init__(self, why: str, *, is_busy: bool) -> None:
        super().__init__(why)
        self.is_busy = is_busy


class HappyEyeballs:
    def __init__(
        self, router: Router, counts: PipelineStatistics, trust: NodeTrust, budget: ByteBudget
    ) -> None:
        self._router = router
        self._counts = counts
        self._trust = trust
        self._budget = budget
        self.paces = EncodingTimes()
        self.avoided = AvoidedPeers()
        """Nodes that did not give what they announced, or not in time, and so are asked last."""

    async def ask(
        self, holders: Sequence[Encoder], question: PictureQuestion, field: str
    ) -> tuple[EncodedPicture, NodeId]:
        """`holders`: in the order in which they are asked. Raises InvalidRequest and VisionEncoderUnavailable
        naming the field where it is the picture's fault, EncodersGone."""
        now_s = trio.current_time()
        # Those that have failed since they were put in order come last, too.
        ordered = sorted(holders, key=lambda each: self.avoided.has(each.path.node_id, now_s))
        n_bytes, n_embd = len(question.picture.data), question.entry.manifest.n_embd_input
        race = Race.of(
            (
                Runner(
                    each.path.node_id,
                    each.work_s,
                    each.travel_s(n_bytes, n_embd),
                    each.slice_s(n_bytes, n_embd),
                )
                for each in ordered[:TRIED_MAX]
            ),
            now_s,
        )
        found = await self._first(race, question)
        if isinstance(found, EncodersGone):
            raise found
        if isinstance(found, list):
            raise _refused(found, field, name_of(question.picture))
        self._counts.pictures_fetched += 1
        return found

    async def _first(
        self, race: Race, question: PictureQuestion
    ) -> tuple[EncodedPicture, NodeId] | list[NoAnswer] | EncodersGone:
        """The first rows, or why the picture is refused, or why there are none. (What is raised in a nursery
        would come in a group.)"""
        send, receive = trio.open_memory_channel[_Outcome](TRIED_MAX)
        refusals, reason = list[NoAnswer](), "no connected node encodes with it"
        async with trio.open_nursery() as nursery:
            while True:
                while (runner := race.begin(trio.current_time())) is not None:
                    nursery.start_soon(self._one, runner.node_id, question, race, send)
                if race.is_over:
                    return refusals or EncodersGone(reason, is_busy=race.is_busy)
                outcome: _Outcome | None = None
                with trio.move_on_at(race.look_again_s()):
                    outcome = await receive.receive()
                if outcome is None:
                    continue
                (node_id, found), now_s = outcome, trio.current_time()
                if isinstance(found, EncodedPicture):
                    nursery.cancel_scope.cancel()
                    self.paces.took(node_id, race.won(node_id, now_s))
                    self._overtaken(race, now_s)
                    return found, node_id
                reason = f"node {node_id}: {found}"
                provoked_by(log, node_id).info("a picture was not encoded by %s: %s", node_id, found)
                race.failed(node_id, now_s, is_busy=found.why == "busy")
                self._judge(node_id, found)
                if found.why in ("bad picture", "died"):
                    refusals.append(found)
                if len(refusals) == REFUSALS_MAX:
                    nursery.cancel_scope.cancel()
                    return refusals
        raise AssertionError("the nursery was cancelled from within only")

    async def _one(
        self,
        node_id: NodeId,
        question: PictureQuestion,
        race: Race,
        send: trio.MemorySendChannel[_Outcome],
    ) -> None:
        def heard() -> None:
            race.heard(node_id, trio.current_time())

        answer: EncodedPicture | NoAnswer
        try:
            answer = await ask(self._router, self._budget, node_id, question, heard)
        except NoAnswer as error:
            answer = error
        send.send_nowait((node_id, answer))

    def _overtaken(self, race: Race, now_s: float) -> None:
        for node_id, worked_s, is_silent in race.overtaken(now_s):
            self.avoided.add(node_id, now_s)
            provoked_by(log, node_id).info("a picture came from another node sooner than from %s", node_id)
            if not is_silent:
                self.paces.took(node_id, worked_s)
            else:
                self._trust.note(node_id, TrustEvent.TOO_SLOW, "a picture: it said nothing")

    def _judge(self, node_id: NodeId, error: NoAnswer) -> None:
        if error.why in ("busy", "bad picture", "died"):
            return
        self._counts.pictures_refused += 1
        self.avoided.add(node_id, trio.current_time())
        if error.trust_event is not None:
            self._trust.note(node_id, error.trust_event, f"a picture: {error}")


def _refused(
    refusals: Sequence[NoAnswer], field: str, medium: MediumName
) -> InvalidRequest | VisionEncoderUnavailable:
    if all(each.why == "bad picture" for each in refusals):
        return InvalidRequest(f"the {medium} is damaged: its encoder cannot decode it", field=field)
    return VisionEncoderUnavailable(f"the {medium} ended the encoders that were to encode it", field=field)
