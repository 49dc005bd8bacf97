"""Every size limit of the wire, each with its reason. Readers check them before they allocate; writers,
before they send.

Sizes are bytes unless the name says otherwise.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

IPC_HEADER_MAX: Final = 64 * MIB
"""JSON between daemon and worker. Conversations with tools are the largest honest headers: single
megabytes."""

IPC_PAYLOAD_MAX: Final = 512 * MIB + KIB
"""Tensor between daemon and worker: 16384 rows of f32 x 8192 (a 70B model's width), with its head."""

SWARM_HEADER_MAX: Final = 64 * KIB
"""MessagePack header of a job message. 256 stage timings, the longest list in it, are under 8 KiB."""

SWARM_PAYLOAD_MAX: Final = 256 * MIB
"""Tensor between nodes: prefill travels in chunks, so this is already 8192 rows of f32 x 8192."""

PACKED_ROWS_MAX: Final = 16 * MIB
"""Rows that come packed, once they are unpacked: 512 rows of f32 x 8192. A few hundred bytes may say that
they are as many."""

WINDOW_ROWS_MAX: Final = 16
"""Rows of one decode job: a token and guesses. Kernels give several rows the bits of single ones up to 7."""

GUESSES_MAX: Final = WINDOW_ROWS_MAX - 1
"""Behind the token of one decode job."""

JOBS_UNDER_WAY_MAX: Final = 16
"""Decode jobs of one request that are on their way at once. 112 rows, with the seven of a batch."""

REQUEST_MAX: Final = 4 * MIB
"""Body of a request or response between nodes: py-libp2p's reads stop short above 4 MB."""

RECORD_MAX: Final = 256 * KIB
"""What a node may say about itself. Gossip silently loses messages above 900 KB, and everybody stores every
record."""

DETAILS_MAX: Final = 32 * KIB
"""The part of it that travels on its own in a large swarm. The longest honest one has 26 KiB: kept beginnings
of prompts of 8 models, 32 links, 32 latencies."""

LOAD_MAX: Final = 64
"""What a node says in a heartbeat that it has to do."""

PIECE_MAX: Final = MIB
"""Bytes of a model in one response: enough that the round trip hardly counts, little enough that the
connection is soon free for others."""

OUTLINE_MAX: Final = 64 * MIB
"""What describes a model's tensors: 65 536 of them, with the longest names, are 38 MB."""

IMAGE_MAX: Final = 3 * MIB
"""A slice of a picture in one request."""

IMAGE_ROWS_MAX: Final = 3 * MIB
"""Bytes of what became of it, in one response: 192 rows of f32 x 4096."""

PICTURE_BYTES_MAX: Final = 32 * MIB
"""The file of a picture, on its way to the process that decodes it."""

PICTURE_ROWS_BYTES_MAX: Final = 128 * MIB
"""What became of a picture, all rows together: 2880 rows of f32 x 8192 (LLaVA 1.6 with all tiles) are 94
MB."""

PICTURE_PIXELS_MAX: Final = 2**25
"""33 megapixels, 96 MiB once they are decoded: more than cameras of phones usually give."""

PICTURE_SIDE_MAX: Final = 16384
"""Pixels on the longer side of a picture."""

SOUND_BYTES_MAX: Final = PICTURE_BYTES_MAX
"""The file of a sound, likewise: 174 s of a WAV in stereo at 48 kHz."""

SOUND_SECONDS_MAX: Final = 600
"""Of one sound: 20 windows of half a minute, which encoders take for it, each some hundred rows."""

SOUND_RATE_MIN: Final = 4000
SOUND_RATE_MAX: Final = 192_000
"""Samples a second in a sound's file."""

SOUND_CHANNELS_MAX: Final = 8

CHECKED_ROWS_MAX: Final = 3 * MIB
"""Bytes of rows in one response, for a check of what a stage computed: 192 rows of f32 x 4096."""

COMMITMENT_MAX: Final = 9 * KIB
"""Bytes of a RowsCommitment: the digests of 4,096 rows that came and of as many that left, 32 at a time."""

PREFIX_KV_MAX: Final = 3 * MIB
"""Bytes of kept KV in one response: 250 rows of a 0.5B model, 50 of a 7B model."""

PREFIX_READ_MAX: Final = 8 * PREFIX_KV_MAX
"""Bytes of kept KV that a worker reads for one response: of all layers of which the names are."""

EXACT_ROWS: Final = 64
"""Rows of a prompt in one batch, of exact requests. Always as many, counted from the first, on every node:
some products and attention round otherwise in batches of other sizes."""

LAYERS_MAX: Final = 1024
"""Layers of a model. The deepest in use has 126; plans and routes cost time for each layer that a stranger
names."""

TENSOR_MAX_NDIM: Final = 8
"""Activations have two dimensions, images four; eight leaves room and bounds the shape that is read."""

TENSOR_MAX_ELEMENTS: Final = 512 * MIB // 2
"""As many elements as the narrowest type (f16) can place in the largest payload."""
