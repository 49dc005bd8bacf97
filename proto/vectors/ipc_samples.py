"""One message of every kind between daemon and worker, with its payload; their fields show every value that
is not the default."""

from __future__ import annotations

from common_samples import (
    EXACT,
    FINGERPRINTED,
    HIDDEN,
    LOGPROBS,
    MODEL_ID,
    NODE_A,
    NODE_B,
    REQUEST_ID,
    SAMPLING,
    SHORT_MEMORY,
    TIMINGS,
    TOKEN_IDS,
)

from swarmllm_proto import ipc, swarm
from swarmllm_proto.codec import encode_again, encode_job, encode_scores
from swarmllm_proto.frames import encode_frame
from swarmllm_proto.tensors import tensor_bytes

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Grüße, 世界"}]
TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "now", "parameters": {"n": [1, 2.5, None]}}}
]


def nested_frame() -> bytes:
    """A job's frame as the payload of a message between daemon and worker."""
    message = swarm.LayerForward(
        request_id=REQUEST_ID, step="embed", stage=0, position=130, n_tokens=1, token=15043, resent=True
    )
    return b"".join(encode_frame(*encode_job(message)))


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
            prefill_chunk_tokens=256,
            n_prefixes=3,
            prefix_max_bytes=2**40,
            prefix_min_tokens=64,
            prefix_ttl_s=60.5,
            session_ttl_s=3600.0,
            tell_prefixes=True,
            prefix_key="cd" * 32,
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
            kernels="ours",
            kernel_timings="/data/kernel-timings.json",
        ),
        b"",
    ),
    ("load", ipc.Load(id=2, start=0, end=4), b""),
    ("load-beside", ipc.Load(id=2, start=0, end=4, mapped_beside_bytes=3_489_660_928), b""),
    ("unload", ipc.Unload(id=3, start=2, end=4), b""),
    ("tokenize-text", ipc.Tokenize(id=4, text="Grüße, 世界"), b""),
    ("tokenize-by-template", ipc.Tokenize(id=15, messages=MESSAGES, template="{{ messages }}"), b""),
    ("tokenize-messages", ipc.Tokenize(id=5, messages=MESSAGES, tools=TOOLS, effort="none"), b""),
    ("tokenize-later", ipc.Tokenize(id=16, text=" und?", place="later"), b""),
    ("open-text-encoder", ipc.OpenTextEncoder(id=1, path="/models/ü.gguf", n_threads=2), b""),
    ("encode-text", ipc.EncodeText(id=2, text="what?", document="世"), b""),
    ("encode-tokens", ipc.EncodeText(id=3), tensor_bytes(TOKEN_IDS)),
    (
        "open-projector",
        ipc.OpenProjector(id=1, path="/models/ü.gguf", projector="/models/ü-mmproj.gguf", n_threads=2),
        b"",
    ),
    ("encode-picture", ipc.EncodePicture(id=2, kind="png", width=640, height=480), b"\x89PNG\r\n\x1a\n"),
    ("check-grammar", ipc.CheckGrammar(id=43, sampling=SAMPLING), b""),
    ("apply-template", ipc.ApplyTemplate(id=13, messages=MESSAGES, tools=TOOLS, effort="high"), b""),
    ("apply-another-template", ipc.ApplyTemplate(id=14, messages=MESSAGES, template="{{ messages }}"), b""),
    ("apply-template-bare", ipc.ApplyTemplate(id=15, messages=MESSAGES, is_to_answer=False), b""),
    ("detokenize", ipc.Detokenize(id=14), tensor_bytes(TOKEN_IDS)),
    ("detokenize-as-generated", ipc.Detokenize(id=31, as_generated=True), tensor_bytes(TOKEN_IDS)),
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
            rounded=True,
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "forward-exact",
        ipc.Forward(
            id=15,
            request_id=REQUEST_ID,
            start=4,
            end=8,
            position=64,
            want="hidden",
            n_prompt_tokens=130,
            exact_rows=386,
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "forward-scores",
        ipc.Forward(
            id=14,
            request_id=REQUEST_ID,
            start=4,
            end=12,
            position=0,
            want="scores",
            sampling=SAMPLING,
            n_prompt_tokens=4,
            scored=(15043, 2**31 - 1),
        ),
        tensor_bytes(HIDDEN),
    ),
    (
        "forward-again",
        ipc.Forward(
            id=14,
            request_id=REQUEST_ID,
            start=4,
            end=12,
            position=9,
            want="again",
            sampling=FINGERPRINTED,
            n_prompt_tokens=4,
            generated=(1, 2, 3, 4, 5, 6),
            scored=(15043, 2**31 - 1),
        ),
        tensor_bytes(HIDDEN),
    ),
    ("take-link", ipc.TakeLink(id=14, peer=NODE_B, direction="sending"), bytes(range(40))),
    ("take-prompt", ipc.TakePrompt(id=18, request_id=REQUEST_ID, stage=1), tensor_bytes(TOKEN_IDS)),
    ("close-links", ipc.CloseLinks(id=15, peer=NODE_B), b""),
    (
        "take-seat-exact",
        ipc.TakeSeat(
            id=17,
            request_id=REQUEST_ID,
            stage=0,
            start=0,
            end=4,
            before=NODE_B,
            after=NODE_B,
            origin=NODE_A,
            n_prompt_tokens=130,
            exact_rows=386,
        ),
        b"",
    ),
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
            row_format="q8_0",
        ),
        b"",
    ),
    (
        "generate",
        ipc.Generate(
            id=9,
            request_id=REQUEST_ID,
            sampling=SAMPLING,
            n_generated=2,
            session_id="Gespräch 1",
            own_kv=True,
        ),
        tensor_bytes(TOKEN_IDS),
    ),
    (
        "generate-exact",
        ipc.Generate(id=9, request_id=REQUEST_ID, sampling=EXACT),
        tensor_bytes(TOKEN_IDS),
    ),
    (
        "generate-short-memory",
        ipc.Generate(id=9, request_id=REQUEST_ID, sampling=SHORT_MEMORY),
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
    (
        "export-prefix-rows",
        ipc.ExportPrefixSnapshot(id=24, start=0, end=12, first_row=64, n_rows=32),
        bytes(range(64)),
    ),
    (
        "import-prefix-from-peer",
        ipc.ImportPrefixSnapshot(
            id=25, start=0, end=12, n_blocks=1, sizes=(3, 2), digest=MODEL_ID, from_peer=True
        ),
        bytes(range(37)),
    ),
    ("look-up-prefix", ipc.LookUpPrefix(id=26, start=0, end=12, scope=NODE_A), bytes(range(64))),
    (
        "check-prefix",
        ipc.CheckPrefix(id=27, request_id=REQUEST_ID, start=0, end=12, scope=NODE_A, blocks=(0, 1)),
        tensor_bytes(TOKEN_IDS),
    ),
    ("check-cuts", ipc.CheckCuts(id=18, units=(4, 6)), b""),
    ("cut", ipc.Cut(id=29, start=4, end=8, if_idle=True), b""),
    ("use-threads", ipc.UseThreads(id=28, n_threads=2), b""),
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
        "loaded-mapped",
        ipc.Loaded(id=2, ranges=((0, 12),), weights_bytes=123_456_789, mapped_bytes=120_000_000),
        b"",
    ),
    (
        "loaded-kernel-class",
        ipc.Loaded(id=2, ranges=((0, 12),), kernel_class="0.3.36-avx2-f16-1f0e9d2c"),
        b"",
    ),
    (
        "loaded-kernels",
        ipc.Loaded(
            id=2,
            ranges=((0, 12),),
            kernels=(
                ipc.KernelChoice(
                    type="Q8_0",
                    k=896,
                    n_threads=1,
                    first_rows=1,
                    last_rows=1,
                    chosen="ggml-dots",
                    ggml_ns=26_500,
                    ours_ns=25_700,
                ),
                ipc.KernelChoice(
                    type="Q8_0",
                    k=896,
                    n_threads=1,
                    first_rows=33,
                    last_rows=2**31 - 1,
                    chosen="avx512",
                    ggml_ns=411_000,
                    ours_ns=318_000,
                ),
            ),
        ),
        b"",
    ),
    (
        "cuts-checked",
        ipc.CutsChecked(id=18, cut_alignment=0, whole_reason="a self-check failed"),
        b"",
    ),
    ("at-work", ipc.AtWork(is_at_work=True), b""),
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
    (
        "turned-windows",
        ipc.Turned(
            request_id=REQUEST_ID,
            stage=1,
            n_jobs=9,
            compute_s=0.1,
            running=False,
            n_windows=7,
            n_window_rows=40,
        ),
        b"",
    ),
    ("link-lost", ipc.LinkLost(peer=NODE_B, direction="sending", reason="ended by the neighbour"), b""),
    (
        "layer-result-scores",
        ipc.LayerResult(id=14, request_id=REQUEST_ID, compute_s=0.0015),
        encode_scores((LOGPROBS, LOGPROBS)),
    ),
    (
        "layer-result-again",
        ipc.LayerResult(id=14, request_id=REQUEST_ID, compute_s=0.0015),
        encode_again(
            (
                ipc.TokenAgain(7, False, LOGPROBS, bytes(range(36)), 0.25),
                ipc.TokenAgain(15043, True, LOGPROBS),
            )
        ),
    ),
    ("layer-result", ipc.LayerResult(id=7, request_id=REQUEST_ID, compute_s=0.0015), tensor_bytes(HIDDEN)),
    (
        "token",
        ipc.Token(id=9, request_id=REQUEST_ID, index=3, token=15043, compute_s=0.25, logprobs=LOGPROBS),
        "世".encode(),
    ),
    (
        "token-fingerprint",
        ipc.Token(id=9, request_id=REQUEST_ID, index=3, token=15043, fingerprint=bytes(range(36))),
        b"",
    ),
    ("token-last", ipc.Token(id=9, request_id=REQUEST_ID, index=4, token=2, finish_reason="stop"), b""),
    (
        "token-stopped",
        ipc.Token(id=9, request_id=REQUEST_ID, index=4, token=13, finish_reason="stop", stopped_by=1),
        b"",
    ),
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
            guesses=(ipc.GuessCount("again", 2, 2), ipc.GuessCount("swift", 9, 7)),
        ),
        b"",
    ),
    ("done", ipc.Done(id=10), b""),
    ("resumed", ipc.Resumed(id=22, kept=(ipc.KeptRows(130, 128), ipc.KeptRows())), b""),
    (
        "prefix-looked-up",
        ipc.PrefixLookedUp(id=26, n_blocks=1, row_bytes=12_288, kv_format="5e" * 16),
        b"",
    ),
    ("prefix-checked", ipc.PrefixChecked(id=27, outcome="close"), b""),
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
    (
        "text-encoder-opened",
        ipc.TextEncoderOpened(id=1, pooling="rank", n_outputs=1, n_tokens_max=512),
        b"",
    ),
    ("text-encoded", ipc.TextEncoded(id=2, n_tokens=4, compute_s=0.5), tensor_bytes(HIDDEN[0])),
    ("projector-opened", ipc.ProjectorOpened(id=1, n_embd=4096, n_rows=576), b""),
    (
        "picture-encoded",
        ipc.PictureEncoded(
            id=2, parts=(ipc.PicturePart((49189, 49152)), ipc.PicturePart(n_rows=2)), compute_s=0.5
        ),
        tensor_bytes(HIDDEN),
    ),
    ("bye", ipc.Bye(id=12), b""),
]
