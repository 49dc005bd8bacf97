"""Small random projectors of the families that hear, and sounds to hear."""

from __future__ import annotations

import io
import struct
import wave
from pathlib import Path
from typing import Final

import numpy as np
from vision_models import ProjectorWriter

from swarmllm.sounds import Sound, parse_sound

FILES: Final = Path(__file__).with_name("sounds")
"""Sweeps of a tone that libsndfile (LAME) wrote."""
RATE: Final = 16000
"""Hz, as all of these families take it."""
MELS: Final = 16
STACKED: Final = {"ultravox": 16, "voxtral": 16, "glma": 20}
"""Positions of the encoder that become one row; the others have a number of their own."""


def tones(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """f32 [n]: a rising tone and a beating one."""
    rng = np.random.default_rng(seed)
    low, high, beat = rng.uniform(150, 500), rng.uniform(900, 2500), rng.uniform(2, 7)
    t = np.arange(int(seconds * rate)) / rate
    rising = np.sin(2 * np.pi * (low * t + 150 * t * t))
    beating = np.sin(2 * np.pi * high * t) * (np.sin(2 * np.pi * beat * t) > 0)
    return (0.4 * rising + 0.3 * beating).astype(np.float32)


def wav_of(samples: np.ndarray, rate: int = RATE, n_channels: int = 1) -> bytes:
    """The file of f32 samples, channels in turn, as whole numbers of 16 bits."""
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(n_channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return written.getvalue()


def float_wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    """The file of f32 samples as they are."""
    body = samples.astype("<f4").tobytes()
    fmt = struct.pack("<4sIHHIIHH", b"fmt ", 16, 3, 1, rate, 4 * rate, 4, 32)
    chunks = b"WAVE" + fmt + struct.pack("<4sI", b"data", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def sound(seconds: float, seed: int = 0, rate: int = RATE) -> Sound:
    return parse_sound(wav_of(tones(seconds, seed, rate), rate), "sound")


def sound_file(name: str) -> Sound:
    return parse_sound((FILES / name).read_bytes(), "sound")


def sound_projector(path: Path, family: str, n_embd: int, *, width: int = 32, seed: int = 1) -> Path:
    """A random one with two layers, to rows of `n_embd`."""
    n_ff, n_positions, n_mels = 48, 1500, MELS
    writer = ProjectorWriter(path, seed)
    gguf = writer.gguf
    gguf.add_bool("clip.has_audio_encoder", True)
    gguf.add_string("clip.projector_type", family)
    numbers = {
        "embedding_length": width,
        "feed_forward_length": n_ff,
        "block_count": 2,
        "projection_dim": n_embd,
        "attention.head_count": 2,
        "num_mel_bins": n_mels,
    }
    stacked = STACKED.get(family, 1)
    if family in STACKED:
        numbers["projector.stack_factor"] = stacked
    for key, number in numbers.items():
        gguf.add_uint32(f"clip.audio.{key}", number)
    gguf.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    if family == "qwen3a":
        _two_dimensional(writer, width, n_mels)
    else:
        for number, n_inputs in ((1, n_mels), (2, width)):
            kernel = writer.random((width, n_inputs, 3), (3 * n_inputs) ** -0.5)
            gguf.add_tensor(f"a.conv1d.{number}.weight", kernel.astype(np.float16))
            gguf.add_tensor(f"a.conv1d.{number}.bias", writer.random((width, 1), 0.1))
    gguf.add_tensor("a.position_embd.weight", writer.random((n_positions, width), 0.3))
    for i in range(2):
        block = f"a.blk.{i}"
        for norm in ("ln1", "ln2"):
            writer.vector(f"{block}.{norm}.weight", width, 1.0)
            writer.vector(f"{block}.{norm}.bias", width)
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            writer.matrix(f"{block}.{part}", width, width)
            if part != "attn_k":
                writer.vector(f"{block}.{part}.bias", width)
        writer.matrix(f"{block}.ffn_up", n_ff, width)
        writer.vector(f"{block}.ffn_up.bias", n_ff)
        writer.matrix(f"{block}.ffn_down", width, n_ff)
        writer.vector(f"{block}.ffn_down.bias", width)
    writer.vector("a.post_ln.weight", width, 1.0)
    writer.vector("a.post_ln.bias", width)
    _rows(writer, family, n_embd, stacked * width, width)
    gguf.write_header_to_file()
    gguf.write_kv_data_to_file()
    gguf.write_tensors_to_file()
    gguf.close()
    return path


def _two_dimensional(writer: ProjectorWriter, width: int, n_mels: int) -> None:
    n_inputs, n_channels = 1, 4
    for number in (1, 2, 3):
        kernel = writer.random((n_channels, n_inputs, 3, 3), (9 * n_inputs) ** -0.5)
        writer.gguf.add_tensor(f"a.conv2d.{number}.weight", kernel.astype(np.float16))
        writer.vector(f"a.conv2d.{number}.bias", n_channels)
        n_inputs = n_channels
    writer.matrix("a.conv_out", width, n_channels * n_mels // 8)


def _rows(writer: ProjectorWriter, family: str, n_embd: int, n_inputs: int, width: int) -> None:
    """What makes rows of the encoder's last layer."""
    n_middle = 2 * n_embd
    match family:
        case "ultravox":
            writer.vector("mm.a.norm_pre.weight", n_inputs, 1.0)
            writer.matrix("mm.a.mlp.1", n_middle, n_inputs)
            writer.vector("mm.a.norm_mid.weight", n_middle // 2, 1.0)
            writer.matrix("mm.a.mlp.2", n_embd, n_middle // 2)
        case "voxtral":
            writer.matrix("mm.a.mlp.1", n_middle, n_inputs)
            writer.matrix("mm.a.mlp.2", n_embd, n_middle)
        case "qwen2a":
            writer.matrix("mm.a.fc", n_embd, width)
            writer.vector("mm.a.fc.bias", n_embd)
        case "glma":
            writer.vector("mm.a.norm_pre.weight", width, 1.0)
            writer.vector("mm.a.norm_pre.bias", width)
            _biased(writer, n_embd, n_middle, n_inputs)
            for end in ("boi", "eoi"):
                writer.gguf.add_tensor(f"v.{end}", writer.random((1, n_embd), 0.3))
        case _:
            _biased(writer, n_embd, n_middle, n_inputs)


def _biased(writer: ProjectorWriter, n_embd: int, n_middle: int, n_inputs: int) -> None:
    writer.matrix("mm.a.mlp.1", n_middle, n_inputs)
    writer.vector("mm.a.mlp.1.bias", n_middle)
    writer.matrix("mm.a.mlp.2", n_embd, n_middle)
    writer.vector("mm.a.mlp.2.bias", n_embd)
