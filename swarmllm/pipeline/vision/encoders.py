"""The encoders of a model as an origin finds them: this node's own, or those of other nodes.

All pictures and sounds of one prompt are encoded with one projector. Where this node has one for the model,
it is that one, also while its file is missing; otherwise it is the projector of the node that is asked first.
Rows of pictures that other nodes encoded are cached like those of this node.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import trio

from swarmllm.errors import (
    BadModel,
    InvalidRequest,
    NoPipeline,
    Overloaded,
    SwarmLLMError,
    VisionEncoderUnavailable,
)
from swarmllm.models.entry import CatalogueEntry
from swarmllm.pictures import Medium, MediumName, Picture, name_of, parse_picture
from swarmllm.pipeline.origin.pictures import EncodedBy
from swarmllm.pipeline.prefix.choice import HolderPath
from swarmllm.pipeline.route.cuts_ahead import ChoosesStages
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.pipeline.vision.asking import PictureQuestion
from swarmllm.pipeline.vision.checking import PictureChecker
from swarmllm.pipeline.vision.choice import USUAL_ROWS, Encoder, by_projector, in_order
from swarmllm.pipeline.vision.compression import measured_half, recodes_picture, rounds_rows
from swarmllm.pipeline.vision.detail import PictureScaler
from swarmllm.pipeline.vision.happy_eyeballs import EncodersGone, HappyEyeballs
from swarmllm.swarm.byte_budget import ByteBudget
from swarmllm.swarm.peers.trust import NodeTrust
from swarmllm.swarm.records.projector_index import taken
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm.workerpool.encoders import EncodedPicture, KeptPictures
from swarmllm.workerpool.settings import ModelFile
from swarmllm_proto.identifiers import Digest, ModelId, NodeId
from swarmllm_proto.swarm import ProjectorAnnounce

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ProjectorEncoders:
    """One projector, for one prompt."""

    _encoders: Encoders
    _entry: CatalogueEntry
    projector: Digest
    _holders: list[Encoder]
    """Other nodes, in the order in which they are asked."""
    looked: list[EncodedBy] = field(default_factory=list)
    """One for each picture, in their order."""

    async def encode(self, picture: Medium, field: str) -> EncodedPicture:
        """Raises InvalidRequest naming the field, EncodersGone, and what this node's encoder raises."""
        began_s = trio.current_time()
        encoded, node_id, is_kept = await self._encoders.encode(
            self._entry, self.projector, self._holders, picture, field
        )
        took_s = trio.current_time() - began_s
        self.looked.append(
            EncodedBy(
                node_id,
                self._encoders.nickname_of(node_id),
                len(encoded.rows),
                took_s,
                is_kept,
                encoded.is_rounded,
                name_of(picture),
            )
        )
        return encoded


class Encoders:
    def __init__(
        self,
        compute: Compute,
        router: Router,
        registry: Registry,
        settings: PipelineSettings,
        counts: PipelineStatistics,
        trust: NodeTrust,
        budget: ByteBudget,
        suspects: Suspects,
        routes: ChoosesStages,
        kept: KeptPictures | None = None,
        checker: PictureChecker | None = None,
    ) -> None:
        """`routes` says who would run a model's first layers now, and is shown a picture first. `kept`: the
        cache of encoded pictures, of this node's encoders too. `checker` is told of rows that come from
        others."""
        self._compute = compute
        self._router = router
        self._registry = registry
        self._settings = settings
        self._trust = trust
        self._suspects = suspects
        self._routes = routes
        self._kept = KeptPictures() if kept is None else kept
        self._checker = checker
        self._elsewhere = HappyEyeballs(router, counts, trust, budget)
        self.scaled = PictureScaler(compute).scaled

    def elsewhere(
        self, model_id: ModelId, entry: CatalogueEntry | None, needs: Collection[MediumName] = ()
    ) -> Mapping[NodeId, ProjectorAnnounce]:
        """Other nodes that may be shown a picture or given a sound for this model, whose projectors take all
        that is in `needs`. `entry`: what this node knows of it."""
        if entry is not None and self._is_private(entry.name):
            return {}
        found = _takers(self._registry.encoders(model_id), needs)
        if entry is None:
            return {} if self._is_private("") else found
        own = entry.projector
        return {
            node_id: each
            for node_id, each in found.items()
            if each.n_embd == entry.manifest.n_embd_input and (own is None or own.blake3 == each.projector)
        }

    def unavailable(
        self, entry: CatalogueEntry, gone: EncodersGone, field: str
    ) -> Overloaded | VisionEncoderUnavailable:
        """Where none of the encoders answered."""
        if gone.is_busy:
            return Overloaded(f"the nodes that encode pictures for {entry.name} are busy", field=field)
        text = f"no node encodes pictures for {entry.name} now: {gone}"
        return VisionEncoderUnavailable(text, field=field)

    def missing(
        self, entry: CatalogueEntry, field: str, needs: Collection[MediumName]
    ) -> VisionEncoderUnavailable | InvalidRequest:
        """Why a model does not take all that is in `needs` where there is no encoder for it."""
        name, own = entry.name, entry.attached_projector
        words = " and ".join(f"{each}s" for each in sorted(needs))
        if own is not None and own.takes.issuperset(needs):
            if entry.projector is not None:
                return VisionEncoderUnavailable(
                    f"the projector of {name} cannot be used here, and no connected node encodes with it.",
                    field=field,
                )
            return VisionEncoderUnavailable(
                f"the projector of {name} is unloaded here, and no connected node encodes with one; load it:"
                f" swarmllm models load {name} --layers mmproj",
                field=field,
            )
        is_private, model_id = self._is_private(name), entry.model_id
        if is_private and _takers(self._registry.encoders(model_id), needs):
            return InvalidRequest(
                f"{name} takes no {words} here: other nodes have its projector, but its prompts may not"
                " leave this node.",
                field=field,
            )
        lacking = [each for each in sorted(needs) if not self._registry.had_encoders(model_id, each)]
        if not (is_private or lacking):
            return VisionEncoderUnavailable(
                f"no node that encodes {words} for {name} is connected now.", field=field
            )
        lacking = [each for each in lacking if own is None or each not in own.takes]
        words = f"{lacking[0]}s" if lacking else words
        return InvalidRequest(f"{name} takes no {words}; send text only.", field=field)

    async def require(self, entry: CatalogueEntry, field: str, needs: Collection[MediumName]) -> None:
        """That there is an encoder for the model now. Raises InvalidRequest where it does not take what is in
        `needs`, VisionEncoderUnavailable."""
        if self.elsewhere(entry.model_id, entry, needs) or await self._has_own(entry, needs):
            return
        raise self.missing(entry, field, needs)

    async def by_projector(
        self, entry: CatalogueEntry, pictures: Sequence[Medium], field: str
    ) -> list[ProjectorEncoders]:
        """Each projector with which these pictures and sounds may be encoded, and who has it. Raises as
        `require` does."""
        needs = {name_of(each) for each in pictures}
        ordered = await self._in_order(entry, needs, sum(len(each.data) for each in pictures))
        known = dict.fromkeys(
            each.projector
            for each in ordered
            if any(self._kept.get((entry.model_id, each.projector, p.digest)) for p in pictures)
        )
        found = dict(by_projector(ordered, known))
        if entry.projector is not None and entry.projector.takes.issuperset(needs):
            found.setdefault(Digest(entry.projector.blake3), [])
        if not found:
            raise self.missing(entry, field, needs)
        return [ProjectorEncoders(self, entry, projector, holders) for projector, holders in found.items()]

    async def encode(
        self,
        entry: CatalogueEntry,
        projector: Digest,
        holders: Sequence[Encoder],
        picture: Medium,
        field: str,
    ) -> tuple[EncodedPicture, NodeId, bool]:
        """The encoded picture or sound, its node, and whether it was kept. Raises as
        `ProjectorEncoders.encode` does."""
        key = entry.model_id, projector, picture.digest
        here = self._router.node_id
        if (kept := self._kept.get(key)) is not None:
            return kept, here, True
        own = entry.projector
        if own is not None and own.blake3 == projector:
            try:
                return await self._compute.encode_picture(ModelFile.of(entry), own, picture), here, False
            except InvalidRequest as error:
                # The worker names its own field.
                raise InvalidRequest(error.message, field=field) from None
            except BadModel as error:
                if not holders:
                    raise VisionEncoderUnavailable(error.message, field=field) from None
                log.warning("pictures for %s are encoded on other nodes: %s", entry.name, error.message)
        sent = await self._as_sent(picture, holders)
        question = PictureQuestion(
            entry, projector, sent, self._rounds_rows(entry, holders), original=picture.digest
        )
        encoded, node_id = await self._elsewhere.ask(holders, question, field)
        if sent is not picture:
            encoded = replace(encoded, is_rounded=True)
        self._kept.put(question.key, encoded)
        if self._checker is not None:
            self._checker.came(question, encoded, node_id, holders)
        return encoded, node_id, False

    async def _as_sent(self, picture: Medium, holders: Sequence[Encoder]) -> Medium:
        """A picture as a JPEG where the line gains by it and that is smaller; else as it is."""
        settings = self._settings
        if (
            not isinstance(picture, Picture)
            or settings.picture_compression == "off"
            or not recodes_picture(
                settings.picture_compression,
                picture,
                holders[0].path.bytes_per_s if holders else None,
                can_now=self._compute.can_recode_now(),
                is_exact=settings.exact,
            )
        ):
            return picture
        try:
            data = await self._compute.recode_picture(picture)
            recoded = await trio.to_thread.run_sync(parse_picture, data, "picture")
        except SwarmLLMError as error:
            # Whose fault that is shows where the picture is encoded.
            log.info("a picture goes to another node as it is: %s", error.message)
            return picture
        return recoded if len(recoded.data) < len(picture.data) else picture

    def _rounds_rows(self, entry: CatalogueEntry, holders: Sequence[Encoder]) -> bool:
        settings = self._settings
        return rounds_rows(
            settings.picture_compression,
            4 * USUAL_ROWS * entry.manifest.n_embd_input,
            holders[0].path.bytes_per_s if holders else None,
            measured_half(entry.manifest.n_embd_input),
            is_exact=settings.exact,
        )

    async def _in_order(
        self, entry: CatalogueEntry, needs: Collection[MediumName], picture_bytes: int
    ) -> list[Encoder]:
        announced = self.elsewhere(entry.model_id, entry, needs)
        if not announced:
            return []
        now_s = trio.current_time()
        try:
            first = (await self._routes.stages_for(entry))[0].node_id
        except NoPipeline:
            first = None
        peers = {peer.node_id: peer for peer in self._router.peers()}
        doubtful = self._suspects.now(now_s) | self._router.untried()
        encoders = []
        for node_id in announced:
            peer, record = peers.get(node_id), self._registry.node(node_id)
            load = record.capability if record is not None else None
            encoders.append(
                Encoder(
                    HolderPath(node_id, peer.rtt_s, peer.bytes_per_s) if peer else HolderPath(node_id),
                    announced[node_id].projector,
                    self._trust.score(node_id),
                    load.active_requests + load.stage_requests if load else 0,
                    is_first_stage=node_id == first,
                    is_doubtful=node_id in doubtful or self._elsewhere.avoided.has(node_id, now_s),
                    encoding_s=self._elsewhere.paces.expected_s(node_id),
                )
            )
        return in_order(encoders, picture_bytes, entry.manifest.n_embd_input)

    async def _has_own(self, entry: CatalogueEntry, needs: Collection[MediumName]) -> bool:
        if entry.projector is None or not entry.projector.takes.issuperset(needs):
            return False
        try:
            await trio.to_thread.run_sync(entry.projector.check_file)
        except BadModel:
            return False
        return True

    def nickname_of(self, node_id: NodeId) -> str:
        record = self._registry.node(node_id)
        return record.nickname if record is not None else ""

    def _is_private(self, name: str) -> bool:
        """Prompts of this model do not leave the node, nor do their pictures."""
        constraints = self._settings.constraints
        is_private = constraints.is_private or self._settings.local_embedding_privacy
        return is_private or name in constraints.private_models


def _takers(
    announced: Mapping[NodeId, ProjectorAnnounce], needs: Collection[MediumName]
) -> dict[NodeId, ProjectorAnnounce]:
    """Whose projectors take all that is in `needs`."""
    return {node_id: each for node_id, each in announced.items() if set(needs).issubset(taken(each))}
