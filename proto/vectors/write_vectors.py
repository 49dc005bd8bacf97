"""Golden bytes: one file per message, written once and then only ever decoded.

    python proto/vectors/write_vectors.py

writes the files that are missing and exits with 1, touching nothing, where an existing file would change:
those bytes are what other versions and other implementations read, so they move only together with
WIRE_VERSION (delete the file then).

`ipc/` and `job/` hold whole frames, `record/`, `request/`, `response/` and `neighbour/` bodies, `tensor/`
tensors, `blocks/` the chained hashes of a prompt, one after the other. Values are chosen to show every field,
accents and limits included."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from swarmllm_proto import ipc, swarm
from swarmllm_proto.blocks import block_hashes
from swarmllm_proto.codec import encode_ipc, encode_job, encode_record, encode_request, encode_response
from swarmllm_proto.file_digests import DigestRun, Digests, FetchDigests
from swarmllm_proto.frames import encode_frame
from swarmllm_proto.limits import SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX
from swarmllm_proto.neighbours import (
    DialBack,
    DialBackRequest,
    DialBackResponse,
    KnownPeer,
    PeerExchangeRequest,
    PeerExchangeResponse,
    encode_neighbour,
)
from swarmllm_proto.tensors import Tensor, tensor_bytes

FOLDER = Path(__file__).resolve().parent

REQUEST_ID = "9f3c0a7e5b1d4c28"
MODEL_ID = "0123456789abcdef" * 4
NODE_A = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
NODE_B = "12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD"

HIDDEN: Tensor = np.array([[0.0, 1.0, -2.5], [0.15625, 65504.0, -0.0]], np.float32)
TOKEN_IDS: Tensor = np.array([1, 15043, 29892, 2**31 - 1], np.int32)
SAMPLING = ipc.Sampling(
    max_tokens=64,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    repeat_penalty=1.1,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    seed=42,
    stop=("\n\n", "<|im_end|>"),
    ignore_eos=True,
    typical_p=0.95,
    xtc_probability=0.5,
    xtc_threshold=0.2,
    dry_multiplier=0.8,
    dry_base=2.0,
    dry_allowed_length=3,
    mirostat=2,
    mirostat_tau=4.0,
    mirostat_eta=0.05,
    logit_bias=((5, -1.5), (2**31 - 1, 1000.0)),
    grammar='root ::= "ü"',
    json_schema='{"type":"object"}',
    json_before="<call>",
    json_after="</call>",
    json_max=3,
    logprobs=True,
    top_logprobs=1,
)
LOGPROBS = (
    ipc.TokenLogprob(token=15043, logprob=-1.5, piece="世".encode()[:2]),
    ipc.TokenLogprob(token=2, logprob=-9999.0, piece=b"<|im_end|>"),
)
MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Grüße, 世界"}]
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "now", "parameters": {"n": [1, 2.5, None]}}}
]
TIMINGS = (
    swarm.StageTiming(stage=0, compute_s=0.0015, busy_s=0.002),
    swarm.StageTiming(stage=1, compute_s=0.0, busy_s=1.0),
)


def nested_frame() -> bytes:
    """A job's frame as the payload of a message between daemon and worker."""
    message = swarm.LayerForward(
        request_id=REQUEST_ID, step="embed", stage=0, position=130, n_tokens=1, token=15043, resent=True
    )
    return b"".join(encode_frame(*encode_job(message)))


PREFIXES = (swarm.StageBlocks(stage=1, names=bytes(range(64))),)

IPC_MESSAGES: list[tuple[str, ipc.AnyDaemonMessage | ipc.AnyWorkerMessage, bytes]] = [
    (
        "open",
        ipc.Open(
            id=1,
            path="/models/ü.gguf",
            cache_dir="/cache",
            owns_path=True,
            model_id=MODEL_ID,
            n_ctx=8192,
            n_slots=4,
            n_threads=2,
            use_mmap=False,
            n_gpu_layers=99,
            continuous_batching=False,
            n_prefixes=3,
            prefix_max_bytes=2**40,
            prefix_min_tokens=64,
            prefix_ttl_s=60.5,
            session_ttl_s=3600.0,
            tell_prefixes=True,
            max_bytes=2**36,
            kv_type="q8_0",
            flash_attention="on",
            use_mlock=True,
            ngram_max_size=4,
            ngram_num_pred_tokens=12,
            draft_path="/models/ü-draft.gguf",
            speculative_gamma=5,
            swift_gamma=3,
            swift_skip_ratio=0.25,
            journal_max_bytes=2**20,
            checked_unit=4,
        ),
        b"",
    ),
    ("load", ipc.Load(id=2, start=0, end=4), b""),
    ("unload", ipc.Unload(id=3, start=2, end=4), b""),
    ("tokenize-text", ipc.Tokenize(id=4, text="Grüße, 世界"), b""),
    ("tokenize-messages", ipc.Tokenize(id=5, messages=MESSAGES, tools=TOOLS, effort="none"), b""),
    ("apply-template", ipc.ApplyTemplate(id=13, messages=MESSAGES, tools=TOOLS, effort="high"), b""),
    ("detokenize", ipc.Detokenize(id=14), tensor_bytes(TOKEN_IDS)),
    ("embed", ipc.Embed(id=6), tensor_bytes(TOKEN_IDS)),
    (
        "forward-hidden",
        ipc.Forward(id=7, request_id=REQUEST_ID, start=4, end=8, position=100, want="hidden"),
        tensor_bytes(HIDDEN),
    ),
    (
        "forward-token",
        ipc.Forward(
            id=2**53,
            request_id=REQUEST_ID,
            start=0,
            end=12,
            position=2**31 - 1,
            want="token",
            sampling=SAMPLING,
            n_prompt_tokens=4,
            generated=(15043, 2**31 - 1),
        ),
        tensor_bytes(TOKEN_IDS),
    ),
    (
        "forward-of-a-seat",
        ipc.Forward(
            id=13,
            request_id=REQUEST_ID,
            start=4,
            end=8,
            position=100,
            want="hidden",
            seat=1,
            timings=TIMINGS[:1],
            waited_s=0.0005,
            resent=True,
        ),
        tensor_bytes(HIDDEN),
    ),
    ("take-link", ipc.TakeLink(id=14, peer=NODE_B, direction="sending"), bytes(range(40))),
    ("close-links", ipc.CloseLinks(id=15, peer=NODE_B), b""),
    (
        "take-seat",
        ipc.TakeSeat(
            id=16,
            request_id=REQUEST_ID,
            stage=1,
            start=4,
            end=12,
            before=NODE_A,
            after=NODE_B,
            origin=NODE_A,
            n_prompt_tokens=4,
            sampling=SAMPLING,
        ),
        b"",
    ),
    (
        "generate",
        ipc.Generate(id=9, request_id=REQUEST_ID, sampling=SAMPLING, n_generated=2, session_id="Gespräch 1"),
        tensor_bytes(TOKEN_IDS),
    ),
    ("cancel-request", ipc.CancelRequest(id=10, request_id=REQUEST_ID), b""),
    ("release-request-kv", ipc.ReleaseRequestKv(id=11, request_id=REQUEST_ID), b""),
    ("hold-request", ipc.HoldRequest(id=21, request_id=REQUEST_ID, hold_s=60.5), b""),
    (
        "resume-request",
        ipc.ResumeRequest(id=22, request_id=REQUEST_ID, resumes="9f3c", n_rows=130, ranges=((0, 4), (8, 12))),
        b"",
    ),
    ("read-journal", ipc.ReadJournal(id=23, request_id=REQUEST_ID, end=4, position=128, n_rows=2), b""),
    (
        "prefix-fetch-probe",
        ipc.PrefixFetchProbe(id=15, request_id=REQUEST_ID, start=4, end=12, scope=NODE_B),
        bytes(range(64)),
    ),
    (
        "export-prefix-snapshot",
        ipc.ExportPrefixSnapshot(id=16, start=0, end=4, scope=NODE_A),
        bytes(range(32)),
    ),
    (
        "import-prefix-snapshot",
        ipc.ImportPrefixSnapshot(
            id=17, start=4, end=12, scope=NODE_A, n_blocks=1, sizes=(3, 2), digest=MODEL_ID
        ),
        bytes(range(37)),
    ),
    ("check-cuts", ipc.CheckCuts(id=18), b""),
    ("shutdown", ipc.Shutdown(id=12), b""),
    ("ready", ipc.Ready(pid=4711, version="0.1.0", engine="llama-cpp-python 0.3.36"), b""),
    (
        "opened",
        ipc.Opened(
            id=1,
            architecture="llama",
            name="guide",
            n_layers=12,
            n_embd=256,
            n_vocab=4096,
            context_length=2048,
            cut_alignment=0,
            whole_reason="layers share weights",
            eos_tokens=(2, 4),
            has_chat_template=True,
        ),
        b"",
    ),
    ("progress", ipc.Progress(id=2, done_bytes=1_000_000, total_bytes=5_000_000_000), b""),
    (
        "loaded",
        ipc.Loaded(id=2, ranges=((0, 2), (6, 12)), weights_bytes=123_456_789, kv_bytes=2**33, work_bytes=77),
        b"",
    ),
    (
        "cuts-checked",
        ipc.CutsChecked(id=18, cut_alignment=0, whole_reason="a self-check failed"),
        b"",
    ),
    ("tokens", ipc.Tokens(id=4), tensor_bytes(TOKEN_IDS)),
    ("text", ipc.Text(id=14), "Grüße, 世界".encode()),
    (
        "layer-result-onward",
        ipc.LayerResult(id=13, request_id=REQUEST_ID, compute_s=0.0015, onward=True),
        b"",
    ),
    (
        "token-onward",
        ipc.Token(id=9, request_id=REQUEST_ID, index=3, token=15043, onward=True),
        "世".encode(),
    ),
    ("arrived", ipc.Arrived(sender=NODE_A), nested_frame()),
    ("relay", ipc.Relay(request_id=REQUEST_ID, receiver=NODE_B), nested_frame()),
    ("turned", ipc.Turned(request_id=REQUEST_ID, stage=1, n_jobs=60, compute_s=0.5, running=True), b""),
    ("link-lost", ipc.LinkLost(peer=NODE_B, direction="sending", reason="ended by the neighbour"), b""),
    ("layer-result", ipc.LayerResult(id=7, request_id=REQUEST_ID, compute_s=0.0015), tensor_bytes(HIDDEN)),
    (
        "token",
        ipc.Token(id=9, request_id=REQUEST_ID, index=3, token=15043, compute_s=0.25, logprobs=LOGPROBS),
        "世".encode(),
    ),
    ("token-last", ipc.Token(id=9, request_id=REQUEST_ID, index=4, token=2, finish_reason="stop"), b""),
    (
        "generate-done",
        ipc.GenerateDone(
            id=9,
            request_id=REQUEST_ID,
            finish_reason="length",
            n_prompt_tokens=4,
            n_generated=64,
            prefill_s=0.125,
            decode_s=2.0,
            n_cached_tokens=3,
            n_guessed=9,
            n_guessed_right=7,
        ),
        b"",
    ),
    ("done", ipc.Done(id=10), b""),
    ("resumed", ipc.Resumed(id=22, kept=(ipc.KeptRows(130, 128), ipc.KeptRows())), b""),
    ("prefix-manifest-update", ipc.PrefixManifestUpdate(n_blocks=(3, 1)), bytes(range(64))),
    ("prefix-fetch-result", ipc.PrefixFetchResult(id=15, n_blocks=2), b""),
    (
        "prefix-snapshot-response",
        ipc.PrefixSnapshotResponse(id=16, n_blocks=1, sizes=(3, 2), digest=MODEL_ID),
        b"12345",
    ),
    (
        "error",
        ipc.Error(
            id=7,
            kind="position_gap",
            message="position 100 but 96 rows are cached",
            field="position",
            request_id=REQUEST_ID,
            fatal=True,
        ),
        b"",
    ),
    ("bye", ipc.Bye(id=12), b""),
]

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
    ("prefill-progress", swarm.PrefillProgress(request_id=REQUEST_ID, position=128, timings=TIMINGS), b""),
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
REQUEST = swarm.PipelineAssignment(
    request_id=REQUEST_ID,
    model_id=MODEL_ID,
    origin=NODE_A,
    stages=(swarm.Stage(node_id=NODE_A, start=0, end=4), swarm.Stage(node_id=NODE_B, start=4, end=12)),
    n_prompt_tokens=130,
    sampling=SAMPLING,
    wants="normed",
    generated=(15043, 2**31 - 1),
    prefixes=PREFIXES,
    resumes=("5b1d4c289f3c0a7e", "r"),
)
RESPONSE = swarm.PipelineAck(
    request_id=REQUEST_ID,
    accepted=False,
    reason="the model has 8 requests here already",
    busy=True,
    n_prefix_blocks=7,
    kept=(swarm.StageRows(1, 130, 128),),
)
PROBE_STAGE = swarm.ProbeStage(request_id=REQUEST_ID)
STAGE_STATE = swarm.StageState(request_id=REQUEST_ID, known=True, busy=True)
FETCH_PIECE = swarm.FetchPiece(
    model_id=MODEL_ID, part="tensor", tensor="blk.4.attn_q.weight", offset=2**20, size_bytes=2**20
)
FETCH_DIGESTS = FetchDigests(
    header=MODEL_ID,
    size_bytes=8_728_960,
    sha256="5e" * 32,
    known=(DigestRun(3, bytes(range(64))), DigestRun(65_535, bytes(32))),
)
DIGESTS = Digests(status="part", known=(DigestRun(0, bytes(range(32))),))
VISION_ENCODE = swarm.VisionEncodeRequest(
    request_id=REQUEST_ID, model_id=MODEL_ID, image=memoryview(b"\x89PNG\r\n\x1a\n"), first_row=192
)
VISION_ENCODED = swarm.VisionEncodeResponse(
    request_id=REQUEST_ID, n_rows=194, n_embd=2, rows=memoryview(np.arange(4, dtype="<f4").tobytes())
)
PIECE = swarm.Piece(status="ok", data=memoryview(bytes(range(256))))

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

TENSORS: list[tuple[str, Tensor]] = [
    ("f32", HIDDEN),
    ("f16", HIDDEN.astype(np.float16)),
    ("i32", TOKEN_IDS),
    ("empty", np.empty((0, 896), np.float32)),
]
BLOCK_PROMPT = tuple((7 * i * i) % 32_000 for i in range(150))
"""Two complete blocks and a rest."""


def encode_job_frame(message: swarm.JobMessage, payload: bytes) -> bytes:
    header, body = encode_job(message, payload)
    return b"".join(encode_frame(header, body, header_max=SWARM_HEADER_MAX, payload_max=SWARM_PAYLOAD_MAX))


def vectors() -> Iterator[tuple[str, bytes]]:
    """(path below this folder, bytes) of every golden file."""
    for name, message, payload in IPC_MESSAGES:
        yield f"ipc/{name}.bin", b"".join(encode_ipc(message, payload))
    for name, job, payload in JOB_MESSAGES:
        yield f"job/{name}.bin", encode_job_frame(job, payload)
    yield "record/node-record.bin", encode_record(RECORD)
    yield "request/pipeline-assignment.bin", encode_request(REQUEST)
    yield "request/fetch-piece.bin", encode_request(FETCH_PIECE)
    yield "request/fetch-digests.bin", encode_request(FETCH_DIGESTS)
    yield "request/probe-stage.bin", encode_request(PROBE_STAGE)
    yield "request/vision-encode.bin", encode_request(VISION_ENCODE)
    yield "response/vision-encode.bin", encode_response(VISION_ENCODED)
    yield "response/pipeline-ack.bin", encode_response(RESPONSE)
    yield "response/digests.bin", encode_response(DIGESTS)
    yield "response/piece.bin", encode_response(PIECE)
    yield "response/stage-state.bin", encode_response(STAGE_STATE)
    for name, neighbour in NEIGHBOUR_MESSAGES:
        yield f"neighbour/{name}.bin", encode_neighbour(neighbour)
    for name, array in TENSORS:
        yield f"tensor/{name}.bin", tensor_bytes(array)
    yield "blocks/two-of-150-tokens.bin", b"".join(block_hashes(MODEL_ID, 4, 12, BLOCK_PROMPT))


def main() -> int:
    changed = [
        path for path, data in vectors() if (FOLDER / path).exists() and (FOLDER / path).read_bytes() != data
    ]
    if changed:
        print("these golden bytes would change:", *changed, sep="\n  ", file=sys.stderr)
        return 1
    for path, data in vectors():
        target = FOLDER / path
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
            print(f"{path}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
