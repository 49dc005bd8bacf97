"""One message of every kind between nodes; their fields show every value that is not the default."""

from __future__ import annotations

import msgspec
import numpy as np
from commitment_samples import COMMITMENT, COMMITTED_PIECE, COMMITTING_ASSIGNMENT
from common_samples import (
    HIDDEN,
    LOGPROBS,
    MODEL_ID,
    NODE_A,
    NODE_B,
    REQUEST_ID,
    RUNS,
    SAMPLING,
    TIMINGS,
    TOKEN_IDS,
)

from swarmllm_proto import ipc, swarm
from swarmllm_proto.codec import encode_scores
from swarmllm_proto.envelope import Details, Envelope, Heartbeat, audience_of
from swarmllm_proto.file_digests import AnyRequest, AnyResponse, DigestRun, Digests, FetchDigests
from swarmllm_proto.frames import VERSION, FrameKind, Hello
from swarmllm_proto.identifiers import Digest, PublishedName
from swarmllm_proto.ipc import PicturePart
from swarmllm_proto.node_load import NodeLoad, encode_load
from swarmllm_proto.record_parts import FetchProgress, RecordDetails
from swarmllm_proto.router_messages import (
    DialBack,
    DialBackRequest,
    DialBackResponse,
    KnownPeer,
    PeerExchangeRequest,
    PeerExchangeResponse,
)
from swarmllm_proto.tensors import tensor_bytes

PREFIXES = (swarm.StageBlocks(stage=1, names=bytes(range(64))),)

JOB_MESSAGES: list[tuple[str, swarm.JobMessage, bytes]] = [
    (
        "layer-forward",
        swarm.LayerForward(
            request_id=REQUEST_ID,
            step="layer",
            stage=2,
            position=128,
            n_tokens=2,
            prefill_left=70_000,
            timings=TIMINGS,
            resent=True,
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "layer-forward-embed",
        swarm.LayerForward(
            request_id=REQUEST_ID, step="embed", stage=0, position=130, n_tokens=1, token=15043
        ),
        b"",
    ),
    (
        "layer-forward-guesses",
        swarm.LayerForward(
            request_id=REQUEST_ID,
            step="embed",
            stage=0,
            position=130,
            n_tokens=3,
            token=15043,
            guesses=(29_892, 3186),
        ),
        b"",
    ),
    (
        "layer-forward-window",
        swarm.LayerForward(
            request_id=REQUEST_ID, step="layer", stage=1, position=130, n_tokens=2, window_rows=7
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "layer-forward-numbered",
        swarm.LayerForward(
            request_id=REQUEST_ID,
            step="layer",
            stage=1,
            position=130,
            n_tokens=2,
            window_rows=16,
            jobs_max=16,
            number=12,
            fresh=9,
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "layer-forward-takes-early",
        swarm.LayerForward(
            request_id=REQUEST_ID,
            step="layer",
            stage=1,
            position=130,
            n_tokens=2,
            window_rows=16,
            jobs_max=16,
            takes_early=True,
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "streaming-token",
        swarm.StreamingToken(request_id=REQUEST_ID, index=0, token=15043, timings=TIMINGS, logprobs=LOGPROBS),
        "é".encode(),
    ),
    (
        "streaming-token-last",
        swarm.StreamingToken(
            request_id=REQUEST_ID, index=9, token=2, finish_reason="stop", n_cached_tokens=64
        ),
        b"",
    ),
    (
        "streaming-token-stopped",
        swarm.StreamingToken(request_id=REQUEST_ID, index=9, token=13, finish_reason="stop", stopped_by=15),
        b"",
    ),
    (
        "streaming-token-fingerprint",
        swarm.StreamingToken(request_id=REQUEST_ID, index=9, token=2, fingerprint=bytes(range(36))),
        b"",
    ),
    (
        "streaming-token-guessed",
        swarm.StreamingToken(
            request_id=REQUEST_ID, index=9, token=2, finish_reason="length", guessed=(11, 7)
        ),
        b"",
    ),
    (
        "remote-generate-request",
        swarm.RemoteGenerateRequest(request_id=REQUEST_ID, n_tokens=4),
        tensor_bytes(TOKEN_IDS),
    ),
    (
        "layer-forward-until",
        swarm.LayerForward(
            request_id=REQUEST_ID,
            step="layer",
            stage=1,
            position=0,
            n_tokens=2,
            prefill_left=1,
            until=1,
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "replay-rows",
        swarm.ReplayRows(request_id=REQUEST_ID, stage=0, position=128, n_tokens=64, until=1),
        b"",
    ),
    ("rows-commitment", COMMITMENT, b""),
    ("prefill-progress", swarm.PrefillProgress(request_id=REQUEST_ID, position=128, timings=TIMINGS), b""),
    (
        "prefill-progress-scores",
        swarm.PrefillProgress(request_id=REQUEST_ID, position=2, timings=TIMINGS),
        encode_scores((LOGPROBS, LOGPROBS)),
    ),
    (
        "pipeline-error",
        swarm.PipelineError(
            request_id=REQUEST_ID,
            node_id=NODE_B,
            kind="worker_died",
            message="the worker was killed by signal 9",
            damaged=True,
            position=128,
        ),
        b"",
    ),
    (
        "cancel-inference",
        swarm.CancelInference(request_id=REQUEST_ID, reason="client left", prefixes=PREFIXES, hold=True),
        b"",
    ),
    (
        "cancel-inference-rows",
        swarm.CancelInference(request_id=REQUEST_ID, prefixes=PREFIXES, n_rows=42),
        b"",
    ),
]

RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    nickname="küche",
    software="swarmllm 0.1.0",
    started_at=1_760_000_000.5,
    sequence=17,
    models=(
        swarm.ShardAnnounce(
            model_id=MODEL_ID,
            name="guide",
            n_layers=12,
            ranges=((0, 4), (8, 12)),
            loading=((4, 6),),
            pinned=((0, 4),),
        ),
    ),
    capability=swarm.NodeCapability(
        memory_total_bytes=2**36,
        memory_free_bytes=2**35 + 1,
        active_requests=1,
        max_requests=10,
        stage_requests=2,
        queued_requests=3,
        memory_bytes_per_s=25e9,
        flops=1.5e11,
        observed_latencies=(
            swarm.ObservedLatency(model_id=MODEL_ID, decode_s=0.00025, prefill_s=0.00003125),
        ),
        observed_links=(swarm.ObservedLink(node_id=NODE_B, rtt_s=0.0125, bytes_per_s=1.25e8),),
        coordinate=swarm.NetworkCoordinate(position_s=(0.0125, -0.5, 0.25), height_s=0.001, error=0.125),
        slots=8,
        free_slots=5,
        free_kv_tokens=3072,
        placed_models=(MODEL_ID,),
        placing_free_bytes=2**33,
    ),
    files=(
        swarm.FileAnnounce(
            model_id=MODEL_ID, name="guide", n_layers=12, layers=((0, 4),), embedding=True, head=True
        ),
    ),
    prefix_caches=(
        swarm.PrefixCacheAnnounce(
            model_id=MODEL_ID,
            prefixes=(swarm.KeptPrefix(bytes(range(32)), 3), swarm.KeptPrefix(bytes(range(32, 64)), 1)),
        ),
    ),
)

SHARING_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=8,
    shares=(swarm.SharedModel(model_id=MODEL_ID, name="guide"),),
)

PUBLISHED_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=11,
    models=(
        swarm.ShardAnnounce(
            model_id=MODEL_ID,
            name="guide",
            n_layers=12,
            ranges=(),
            loading=((4, 6),),
            fetched=(2**20, 2**31),
        ),
    ),
    shares=(
        swarm.SharedModel(
            model_id=MODEL_ID,
            name="guide",
            source=PublishedName("hf:ORG/REPO:FILE-Q4_K_M-00001-of-00004.gguf"),
        ),
    ),
)

SPREADING_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=13,
    shared_files=(
        swarm.SharedFile(
            source=PublishedName("hf:ORG/REPO:FILE-Q4_K_M-00001-of-00004.gguf"),
            name="big",
            header=Digest("5e" * 32),
            size_bytes=42_520_393_312,
            sha256=Digest("7a" * 32),
            parts=(
                swarm.FilePart(node_id=NODE_A, start=0, end=40),
                swarm.FilePart(node_id=NODE_B, start=40, end=80),
            ),
        ),
    ),
    fetched_files=(
        swarm.FetchedFile(
            header=Digest("5e" * 32),
            state="fetching",
            layers=((0, 20),),
            arrived_bytes=2**30,
            total_bytes=21_000_000_000,
        ),
        swarm.FetchedFile(header=Digest("6f" * 32), state="failed", problem="no room"),
    ),
)

KV_TYPE_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=12,
    models=(
        swarm.ShardAnnounce(model_id=MODEL_ID, name="guide", n_layers=12, ranges=((0, 4),), kv_type="q8_0"),
    ),
)

KERNEL_CLASS_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=14,
    models=(
        swarm.ShardAnnounce(
            model_id=MODEL_ID,
            name="guide",
            n_layers=12,
            ranges=((0, 4),),
            kv_type="f16",
            kernel_class="0.3.36-avx2-f16-1f0e9d2c",
        ),
    ),
)

SEEING_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=13,
    projectors=(swarm.ProjectorAnnounce(model_id=MODEL_ID, projector="5e" * 32, n_embd=256),),
)

HEARING_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=17,
    projectors=(
        swarm.ProjectorAnnounce(model_id=MODEL_ID, projector="5e" * 32, n_embd=256, takes=("sound",)),
    ),
)

GIVING_PROJECTOR_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=16,
    projectors=(
        swarm.ProjectorAnnounce(
            model_id=MODEL_ID, projector="5e" * 32, n_embd=256, shard=2**32 - 1, size_bytes=3_170_304
        ),
    ),
)

LAYING_OUT_RECORD = swarm.NodeRecord(
    node_id=NODE_A, sequence=9, capability=swarm.NodeCapability(picture_runs=True)
)

GPU_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=9,
    capability=swarm.NodeCapability(
        gpus=(
            swarm.GpuMemory(
                name="NVIDIA GeForce RTX 3060", total_bytes=12_884_901_888, free_bytes=9_663_676_416
            ),
        )
    ),
)

PACKING_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=9,
    capability=swarm.NodeCapability(row_formats=("lossless", "q8_0")),
)

ACCEPTING_RECORD = swarm.NodeRecord(
    node_id=NODE_A,
    sequence=9,
    capability=swarm.NodeCapability(
        placing_free_bytes=2**33, placing_free_disk_bytes=2**34, accepts_shares_of=("members", NODE_B)
    ),
)

REQUESTS: list[tuple[str, AnyRequest]] = [
    ("committing-pipeline-assignment", COMMITTING_ASSIGNMENT),
    (
        "packed-pipeline-assignment",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(
                swarm.Stage(node_id=NODE_A, start=0, end=4),
                swarm.Stage(node_id=NODE_B, start=4, end=12),
            ),
            n_prompt_tokens=130,
            sampling=SAMPLING,
            row_formats=("f32", "q8_0"),
        ),
    ),
    (
        "pipeline-assignment",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(
                swarm.Stage(node_id=NODE_A, start=0, end=4),
                swarm.Stage(node_id=NODE_B, start=4, end=12),
            ),
            n_prompt_tokens=130,
            sampling=SAMPLING,
            wants="normed",
            generated=(15043, 2**31 - 1),
            prefixes=PREFIXES,
            resumes=("5b1d4c289f3c0a7e", "r"),
        ),
    ),
    (
        "pipeline-assignment-exact",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(
                swarm.Stage(node_id=NODE_A, start=0, end=4),
                swarm.Stage(node_id=NODE_B, start=4, end=12),
            ),
            n_prompt_tokens=130,
            sampling=ipc.Sampling(max_tokens=256, exact=True),
            n_generated=2,
        ),
    ),
    (
        "pipeline-assignment-scored",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(swarm.Stage(node_id=NODE_B, start=0, end=12),),
            n_prompt_tokens=2,
            sampling=SAMPLING,
            wants="normed",
            scored=(15043, 2**31 - 1),
        ),
    ),
    (
        "pipeline-assignment-picture-runs",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(swarm.Stage(node_id=NODE_B, start=0, end=12),),
            n_prompt_tokens=130,
            sampling=SAMPLING,
            picture_runs=RUNS,
        ),
    ),
    (
        "pipeline-assignment-kept-elsewhere",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(
                swarm.Stage(node_id=NODE_A, start=0, end=4),
                swarm.Stage(node_id=NODE_B, start=4, end=12),
            ),
            n_prompt_tokens=130,
            sampling=SAMPLING,
            prefixes=PREFIXES,
            kept_elsewhere=(
                swarm.KeptElsewhere(stage=1, node_id=NODE_A, start=4, end=12, n_blocks=1),
                swarm.KeptElsewhere(
                    stage=1, node_id=NODE_A, start=0, end=12, n_blocks=2, names=bytes(range(64))
                ),
            ),
        ),
    ),
    (
        "pipeline-assignment-only-fetches",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(swarm.Stage(node_id=NODE_B, start=0, end=12),),
            n_prompt_tokens=130,
            sampling=SAMPLING,
            prefixes=PREFIXES,
            kept_elsewhere=(swarm.KeptElsewhere(stage=0, node_id=NODE_A, start=0, end=12, n_blocks=1),),
            only_fetches=True,
        ),
    ),
    (
        "pipeline-assignment-prompt",
        swarm.PipelineAssignment(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            origin=NODE_A,
            stages=(swarm.Stage(node_id=NODE_B, start=0, end=12),),
            n_prompt_tokens=2,
            sampling=SAMPLING,
            prompt=bytes.fromhex("c33a0000ffffff7f"),
        ),
    ),
    ("tell-prompt", swarm.TellPrompt(request_id=REQUEST_ID, tokens=bytes.fromhex("c33a0000ffffff7f"))),
    ("probe-stage", swarm.ProbeStage(request_id=REQUEST_ID)),
    (
        "fetch-rows",
        swarm.FetchRows(request_id=REQUEST_ID, boundary=4, position=64, n_tokens=32, digest_only=True),
    ),
    (
        "prefix-kv-fetch",
        swarm.PrefixKvFetch(
            model_id=MODEL_ID, names=bytes(range(64)), kv_format="5e" * 16, first_row=96, n_rows=32
        ),
    ),
    (
        "prefix-kv-fetch-takes",
        swarm.PrefixKvFetch(
            model_id=MODEL_ID,
            names=bytes(range(64)),
            kv_format="5e" * 16,
            first_row=0,
            n_rows=32,
            takes="q8_0",
            kv_encoding="5f" * 16,
        ),
    ),
    (
        "prefix-kv-fetch-of-stage",
        swarm.PrefixKvFetch(
            model_id=MODEL_ID,
            names=bytes(range(64)),
            kv_format="5e" * 16,
            first_row=96,
            n_rows=32,
            scope=NODE_A,
            held=(0, 12),
            layers=(4, 12),
        ),
    ),
    (
        "fetch-piece",
        swarm.FetchPiece(
            model_id=MODEL_ID, part="tensor", tensor="blk.4.attn_q.weight", offset=2**20, size_bytes=2**20
        ),
    ),
    (
        "fetch-piece-of-projector",
        swarm.FetchPiece(
            model_id=MODEL_ID, part="projector", offset=2**20, size_bytes=2**20, projector="5e" * 32
        ),
    ),
    (
        "fetch-digests",
        FetchDigests(
            header=MODEL_ID,
            size_bytes=8_728_960,
            sha256="5e" * 32,
            known=(DigestRun(3, bytes(range(64))), DigestRun(65_535, bytes(32))),
        ),
    ),
    (
        "vision-encode",
        swarm.VisionEncodeRequest(
            request_id=REQUEST_ID, model_id=MODEL_ID, image=memoryview(b"\x89PNG\r\n\x1a\n"), first_row=192
        ),
    ),
    (
        "vision-encode-slice",
        swarm.VisionEncodeRequest(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            image=memoryview(bytes(range(16))),
            projector="5e" * 32,
            digest="ab" * 32,
            size_bytes=3 * 2**20 + 16,
            offset=3 * 2**20,
        ),
    ),
    (
        "vision-encode-half",
        swarm.VisionEncodeRequest(
            request_id=REQUEST_ID,
            model_id=MODEL_ID,
            image=memoryview(bytes(range(16))),
            projector="5e" * 32,
            digest="ab" * 32,
            rows_as="half",
        ),
    ),
]

RESPONSES: list[tuple[str, AnyResponse]] = [
    (
        "pipeline-ack",
        swarm.PipelineAck(
            request_id=REQUEST_ID,
            accepted=False,
            reason="the model has 8 requests here already",
            busy=True,
            n_prefix_blocks=7,
            kept=(swarm.StageRows(1, 130, 128),),
        ),
    ),
    ("pipeline-ack-running", swarm.PipelineAck(request_id=REQUEST_ID, accepted=True, n_running=3)),
    (
        "pipeline-ack-kernel-class",
        swarm.PipelineAck(request_id=REQUEST_ID, accepted=True, kernel_class="0.3.36-avx2-f16-1f0e9d2c"),
    ),
    (
        "pipeline-ack-fetched",
        swarm.PipelineAck(request_id=REQUEST_ID, accepted=True, n_prefix_blocks=2, fetched=(1,)),
    ),
    (
        "pipeline-ack-picture-runs",
        swarm.PipelineAck(request_id=REQUEST_ID, accepted=True, picture_runs=True),
    ),
    ("pipeline-ack-guesses", swarm.PipelineAck(request_id=REQUEST_ID, accepted=True, guesses=True)),
    (
        "pipeline-ack-unreachable",
        swarm.PipelineAck(
            request_id=REQUEST_ID, accepted=False, reason="this node does not reach it", unreachable=NODE_B
        ),
    ),
    ("stage-state", swarm.StageState(request_id=REQUEST_ID, known=True, busy=True)),
    ("stage-state-rows", swarm.StageState(request_id=REQUEST_ID, known=True, n_received=9, n_sent=5)),
    (
        "rows-piece",
        swarm.RowsPiece(
            request_id=REQUEST_ID, known=True, digest=bytes(range(32)), rows=memoryview(bytes(range(16)))
        ),
    ),
    ("rows-piece-committed", COMMITTED_PIECE),
    (
        "prefix-kv",
        swarm.PrefixKv(status="ok", digest=bytes(range(32)), data=memoryview(bytes(range(16)))),
    ),
    (
        "prefix-kv-other-format",
        swarm.PrefixKv(
            status="ok",
            digest=bytes(range(32)),
            data=memoryview(bytes(range(16))),
            other_format=True,
        ),
    ),
    ("prefix-kv-absent", swarm.PrefixKv(status="absent")),
    ("piece", swarm.Piece(status="ok", data=memoryview(bytes(range(256))))),
    ("digests", Digests(status="part", known=(DigestRun(0, bytes(range(32))),))),
    (
        "vision-encode",
        swarm.VisionEncodeResponse(
            request_id=REQUEST_ID, n_rows=194, n_embd=2, rows=memoryview(np.arange(4, dtype="<f4").tobytes())
        ),
    ),
    (
        "vision-encode-refused",
        swarm.VisionEncodeResponse(request_id=REQUEST_ID, error="VisionEncoderUnavailable"),
    ),
    (
        "vision-encode-not-yet",
        swarm.VisionEncodeResponse(request_id=REQUEST_ID, n_received=3 * 2**20),
    ),
    (
        "vision-encode-parts",
        swarm.VisionEncodeResponse(
            request_id=REQUEST_ID,
            n_rows=2,
            n_embd=2,
            rows=memoryview(np.arange(4, dtype="<f4").tobytes()),
            n_received=16,
            parts=(PicturePart((7, 9)), PicturePart((), 2)),
            digest=bytes(range(32)),
        ),
    ),
    (
        "vision-encode-half",
        swarm.VisionEncodeResponse(
            request_id=REQUEST_ID,
            n_rows=2,
            n_embd=2,
            # `pack_half` of 0, 1, 2, 3; another zstd may make other bytes of them.
            rows=memoryview(bytes.fromhex("28b52ffd200841000000000000003c4042")),
            n_received=16,
            parts=(PicturePart((), 2),),
            digest=bytes(range(32)),
            rows_as="half",
            n_here=2,
        ),
    ),
    (
        "vision-encode-parts-on-a-grid",
        swarm.VisionEncodeResponse(
            request_id=REQUEST_ID,
            n_rows=2,
            n_embd=2,
            rows=memoryview(np.arange(4, dtype="<f4").tobytes()),
            parts=(PicturePart((7,)), PicturePart((), 2, 1, False)),
            digest=bytes(range(32)),
        ),
    ),
]

NEIGHBOUR_MESSAGES = [
    ("peer-exchange-request", PeerExchangeRequest(n_max=16)),
    (
        "peer-exchange-response",
        PeerExchangeResponse(
            peers=(
                KnownPeer(node_id=NODE_A, addresses=("/ip4/192.0.2.1/tcp/8810", "/ip6/2001:db8::1/tcp/8810")),
            )
        ),
    ),
    ("dial-back-request", DialBackRequest()),
    (
        "dial-back-response",
        DialBackResponse(
            control=(DialBack(address="/ip4/192.0.2.1/tcp/8810", reached=True),),
            data=(DialBack(address="/ip4/192.0.2.1/tcp/8811", reached=False),),
            observed_ip="198.51.100.7",
        ),
    ),
]


OUTLINE = swarm.Outline(
    header_bytes=71_616,
    size_bytes=8_728_960,
    digests={"blk.0.attn_q.weight": MODEL_ID, "output_norm.weight": "5e" * 32},
    checked_unit=4,
)
"""Asked for in pieces, and so no message of its own."""

RECORD_DETAILS = RecordDetails(
    observed_latencies=(swarm.ObservedLatency(model_id=MODEL_ID, decode_s=0.004, prefill_s=0.0005),),
    observed_links=(swarm.ObservedLink(node_id=NODE_B, rtt_s=0.012, bytes_per_s=2.5e6),),
    prefix_caches=(
        swarm.PrefixCacheAnnounce(model_id=MODEL_ID, prefixes=(swarm.KeptPrefix(bytes(range(32)), 3),)),
    ),
    fetched=(FetchProgress(MODEL_ID, 1_000_000, 400_000_000),),
)

STATEMENTS: list[tuple[str, Envelope | Heartbeat | Details]] = [
    (
        "envelope",
        Envelope(
            node_id=NODE_A,
            started_at_ms=1_760_000_000_500,
            sequence=17,
            addresses=("/ip4/192.0.2.1/tcp/8810", "/ip6/2001:db8::1/tcp/8810"),
            data_addresses=("/ip4/192.0.2.1/tcp/8811",),
            record=b"a NodeRecord",
        ),
    ),
    (
        "envelope-audience",
        Envelope(
            node_id=NODE_A,
            started_at_ms=1_760_000_000_500,
            sequence=18,
            record=b"a NodeRecord",
            audience=audience_of((NODE_A, NODE_B)),
        ),
    ),
    (
        "envelope-brief",
        Envelope(
            node_id=NODE_A,
            started_at_ms=1_760_000_000_500,
            sequence=19,
            record=b"a brief NodeRecord",
            details=3,
        ),
    ),
    (
        "details",
        Details(
            node_id=NODE_A,
            started_at_ms=1_760_000_000_500,
            number=3,
            details=msgspec.msgpack.encode(RECORD_DETAILS),
        ),
    ),
    (
        "heartbeat-details",
        Heartbeat(node_id=NODE_A, started_at_ms=1_760_000_000_500, sequence=19, beat=6, details=4),
    ),
    ("heartbeat", Heartbeat(node_id=NODE_A, started_at_ms=1_760_000_000_500, sequence=17, beat=3)),
    (
        "heartbeat-audience",
        Heartbeat(
            node_id=NODE_A,
            started_at_ms=1_760_000_000_500,
            sequence=17,
            beat=5,
            audience=audience_of((NODE_A, NODE_B)),
        ),
    ),
    (
        "heartbeat-load",
        Heartbeat(
            node_id=NODE_A,
            started_at_ms=1_760_000_000_500,
            sequence=17,
            beat=4,
            load=encode_load(NodeLoad(1, 2, free_slots=5, free_kv_tokens=8192)),
        ),
    ),
]
"""Signed by `demo_signature`, which is none: libp2p's keys do not belong here."""

CONTROL_FRAMES: list[tuple[str, FrameKind, bytes | Hello]] = [
    ("hello", FrameKind.HELLO, Hello(v=VERSION, acks=True)),
    ("hello-of-one-that-rests", FrameKind.HELLO, Hello(v=VERSION, acks=True, rests=True)),
    (
        "hello-to-a-dialler",
        FrameKind.HELLO,
        Hello(v=VERSION, acks=True, rests=True, seen="/ip4/192.0.2.1/tcp/40000"),
    ),
    ("hello-of-a-link", FrameKind.HELLO, Hello(v=VERSION, link=MODEL_ID)),
    ("hello-of-bulk", FrameKind.HELLO, Hello(v=VERSION, bulk=True)),
    ("ping", FrameKind.PING, bytes(range(8))),
    ("pong", FrameKind.PONG, bytes(range(8))),
    ("goodbye", FrameKind.GOODBYE, b""),
    ("link", FrameKind.LINK, b""),
    ("last", FrameKind.LAST, b""),
    ("ack", FrameKind.ACK, (2**40 + 1).to_bytes(8, "little")),
    ("question-for-load", FrameKind.LOAD, b""),
    ("load", FrameKind.LOAD, encode_load(NodeLoad(1, 2, free_slots=5, free_kv_tokens=8192))),
]
"""Of the data plane; frames of kind 1 carry what is in `JOB_MESSAGES`."""
