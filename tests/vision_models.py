"""Small random projectors of the supported families, pictures to look at, and what one process makes of both:
libmtmd and libllama on the uncut model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from deadlines import DEADLINE_S
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from PIL import Image

from swarmllm.pictures import Picture, parse_picture
from tests.vision_projectors import PLAIN, Sizes
from tests.workers.blueprint import Family, write
from tests.workers.factory import SPECS, Spec, build
from tests.workers.families import FAMILIES

N_BATCH = 32
"""Rows of one decode of `vision_reference`; prompts and pictures are longer."""
REFERENCE = Path(__file__).with_name("vision_reference.py")
IDEFICS_TOKENS = (
    "\n\n",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<fake_token_around_image><row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
OTHER_TOKENS = (
    *("<img>", "</img>", "[IMG_END]", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)),
    *("<|media_start|>", "<|media_begin|>", "<|media_end|>", "<|img|>", "<|endofimg|>"),
    *("<image>", "</image>", "<slice>", "</slice>", "\n"),
)
"""Special tokens around pictures of the other families."""
SOUND_TOKENS = (
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "[BEGIN_AUDIO]",
    "<sound>",
)
"""Special tokens around sounds, of text models that have none of their own."""
OWN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<start_of_image>", "<end_of_image>")
OWN_TEXTS = ("qwen2vl", "qwen3vl", "qwen3vlmoe", "gemma3", "gemma3-f16")
"""Text models of which alone the pictures have these tokens around them."""
GRID_FAMILIES = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")
N_DEEPSTACK = 2
LFM2 = replace(
    FAMILIES["lfm2"],
    n_layers=8,
    keys={**FAMILIES["lfm2"].keys, "attention.head_count_kv": [0, 2] * 4, "context_length": 2048},
)
TEXTS: Final[dict[str, Spec | Family]] = {
    **SPECS,
    "chatglm": FAMILIES["glm-edge"],
    "deepseek2": FAMILIES["deepseek-v2-lite"],
    "gemma3-f16": replace(SPECS["gemma3"], types=(Type.F16,)),
    "lfm2": LFM2,
    "llama-q8_0": replace(SPECS["llama"], types=(Type.Q8_0,)),
    "llama4": replace(FAMILIES["llama-4 scout"], n_layers=16),
    "mistral3": FAMILIES["mistral-3"],
    "qwen2-wide": replace(SPECS["qwen2"], n_embd=128, n_heads=8, types=(Type.Q8_0,)),
    "qwen2vl": Spec(
        "qwen2vl", qkv_bias=True, keys={"rope.dimension_sections": [4, 2, 2, 0]}, types=(Type.Q8_0,)
    ),
    "qwen3vl": Spec(
        "qwen3vl",
        n_layers=12,
        qk_norm=True,
        keys={"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": N_DEEPSTACK},
        types=(Type.Q8_0,),
    ),
    "qwen3vlmoe": replace(
        FAMILIES["qwen3-vl moe"],
        n_layers=12,
        keys={**FAMILIES["qwen3-vl moe"].keys, "n_deepstack_layers": N_DEEPSTACK},
    ),
    **{
        f"long-{name}": replace(SPECS[name], types=(Type.Q8_0,), context_length=2048)
        for name in ("llama", "qwen2", "qwen3")
    },
    "qwen3moe": replace(SPECS["qwen3moe"], n_layers=4),
}
"""Text models, all of which four nodes can share."""


def text_model(folder: Path, name: str) -> Path:
    """A random one of `TEXTS`, with the special tokens of all projectors."""
    path = folder / f"{name}.gguf"
    tokens = IDEFICS_TOKENS + OTHER_TOKENS + (OWN_TOKENS if name in OWN_TEXTS else SOUND_TOKENS)
    if path.exists():
        return path
    text = TEXTS[name]
    if isinstance(text, Family):
        return write(path, replace(text, extra_tokens=tokens))
    return build(path, replace(text, extra_tokens=tokens))


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray:
    """u8 [height, width, 3]: waves, and a rectangle of another colour."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([(x * 3 + seed * 20) % 256, (y * 5) % 256, (x * y // 7) % 256], -1).astype(np.uint8)
    image[height // 4 : height // 2, width // 4 : width // 2] = rng.integers(0, 256, 3)
    return image


def file_of(image: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    written = io.BytesIO()
    Image.fromarray(image).save(written, kind, **options)
    return written.getvalue()


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> Picture:
    return parse_picture(file_of(pixels(width, height, seed), kind), "picture")


class ProjectorWriter:
    def __init__(self, path: Path, seed: int) -> None:
        self.gguf = GGUFWriter(path, "clip", use_temp_file=False)
        self._rng = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int, scale: float | None = None) -> None:
        """f32 of a standard deviation that keeps the length of a row."""
        self.gguf.add_tensor(f"{name}.weight", self.random(shape, scale or shape[-1] ** -0.5))

    def random(self, shape: Sequence[int], scale: float) -> np.ndarray:
        return (self._rng.standard_normal(shape) * scale).astype(np.float32)

    def normal(self, *shape: int) -> np.ndarray:
        return self._rng.standard_normal(shape).astype(np.float32)

    def vector(self, name: str, size: int, around: float = 0.0) -> None:
        self.gguf.add_tensor(name, (around + 0.1 * self._rng.standard_normal(size)).astype(np.float32))


def projector(
    path: Path,
    family: str,
    n_embd: int,
    *,
    image: int | None = None,
    patch: int | None = None,
    merge: int | None = None,
    width: int = 32,
    n_layers: int = 2,
    without: Sequence[str] = (),
    tiles: Sequence[int] = (),
    seed: int = 1,
) -> Path:
    """A random projector to `n_embd`; `without`: tensors that are left out, `tiles`: widths and heights of
    pictures that are cut into tiles; `merge`: patches on each side of the square that becomes a row."""
    n_ff = 48
    plain = PLAIN.get(family)
    image = image or (plain.image if plain else 32)
    patch = patch if patch is not None else plain.patch if plain else 8
    writer = ProjectorWriter(path, seed)
    gguf = writer.gguf
    if without:
        add = gguf.add_tensor
        gguf.add_tensor = lambda name, values: None if name in without else add(name, values)  # type: ignore[method-assign]
    gguf.add_bool("clip.has_vision_encoder", True)
    gguf.add_string("clip.projector_type", family)
    gguf.add_bool("clip.use_gelu", True)
    numbers = {
        "embedding_length": width,
        "feed_forward_length": n_ff,
        "block_count": n_layers,
        "projection_dim": n_embd,
        "image_size": image,
        "patch_size": patch,
        "attention.head_count": 2,
    }
    for key, number in numbers.items():
        gguf.add_uint32(f"clip.vision.{key}", number)
    gguf.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    if tiles:
        gguf.add_array("clip.vision.image_grid_pinpoints", list(tiles))
        gguf.add_string("clip.vision.mm_patch_merge_type", "spatial_unpad")
        writer.vector("model.image_newline", n_embd)
    gguf.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    gguf.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    on_grid, is_windowed = family in GRID_FAMILIES, family == "qwen2.5vl_merger"
    is_deep = family == "qwen3vl_merger"
    if plain and plain.is_linear:
        writer.matrix("v.patch_embd", width, 3 * patch * patch)
    else:
        writer.matrix("v.patch_embd", width, 3, patch, patch, scale=(3 * patch * patch) ** -0.5)
    if on_grid:
        # Of the second of two frames.
        values = writer.random((width, 3, patch, patch), (3 * patch * patch) ** -0.5)
        gguf.add_tensor("v.patch_embd.weight.1", values)
    if is_deep or (not on_grid and not (plain and plain.is_linear)):
        writer.vector("v.patch_embd.bias", width)
    has_class = plain.has_class if plain else family == "internvl"
    if plain.has_positions if plain else is_deep or not on_grid:
        n_positions = plain.n_positions if plain and plain.n_positions else (image // patch) ** 2 + has_class
        writer.matrix("v.position_embd", n_positions, width, scale=0.3)
    if has_class:
        writer.vector("v.class_embd", width)
    for i in range(n_layers):
        block = f"v.blk.{i}"
        for norm in ("ln1", "ln2"):
            writer.vector(f"{block}.{norm}.weight", width, 1.0)
            if not is_windowed:
                writer.vector(f"{block}.{norm}.bias", width)
        parts = {"attn_qkv": 3} if is_deep else {"attn_q": 1, "attn_k": 1, "attn_v": 1}
        for part, n in {**parts, "attn_out": 1}.items():
            writer.matrix(f"{block}.{part}", n * width, width)
            writer.vector(f"{block}.{part}.bias", n * width)
        writer.matrix(f"{block}.ffn_up", n_ff, width)
        writer.vector(f"{block}.ffn_up.bias", n_ff)
        if is_windowed:
            writer.matrix(f"{block}.ffn_gate", n_ff, width)
            writer.vector(f"{block}.ffn_gate.bias", n_ff)
        writer.matrix(f"{block}.ffn_down", width, n_ff)
        writer.vector(f"{block}.ffn_down.bias", width)
        if is_deep and i < N_DEEPSTACK:
            _further_part(writer, f"v.deepstack.{i}", 4 * width, n_embd)
    if family != "dots_ocr":
        writer.vector("v.post_ln.weight", width, 1.0)
        if not is_windowed:
            writer.vector("v.post_ln.bias", width)
    if plain:
        plain.add(writer, Sizes(n_embd, width, merge or plain.merge))
    elif family == "idefics3":
        gguf.add_uint32("clip.vision.projector.scale_factor", 2)
        writer.matrix("mm.model.fc", n_embd, 4 * width)
    elif family == "internvl":
        gguf.add_uint32("clip.vision.projector.scale_factor", 2)
        writer.vector("mm.model.mlp.0.weight", 4 * width, 1.0)
        writer.vector("mm.model.mlp.0.bias", 4 * width)
        writer.matrix("mm.model.mlp.1", n_embd, 4 * width)
        writer.vector("mm.model.mlp.1.bias", n_embd)
        writer.matrix("mm.model.mlp.3", n_embd, n_embd)
        writer.vector("mm.model.mlp.3.bias", n_embd)
    elif on_grid:
        if is_windowed:
            gguf.add_uint32("clip.vision.n_wa_pattern", 2)
            gguf.add_uint32("clip.vision.window_size", 32)
        writer.matrix("mm.0", 4 * width, 4 * width)
        writer.vector("mm.0.bias", 4 * width)
        writer.matrix("mm.2", n_embd, 4 * width)
        writer.vector("mm.2.bias", n_embd)
    elif family == "gemma3":
        gguf.add_uint32("clip.vision.projector.scale_factor", 2)
        writer.matrix("mm.input_projection", width, n_embd, scale=width**-0.5)
        writer.vector("mm.soft_emb_norm.weight", width, 1.0)
    else:
        last = "mm.1" if family == "janus_pro" else "mm.2"
        writer.matrix("mm.0", n_embd, width)
        writer.vector("mm.0.bias", n_embd)
        writer.matrix(last, n_embd, n_embd)
        writer.vector(f"{last}.bias", n_embd)
    gguf.write_header_to_file()
    gguf.write_kv_data_to_file()
    gguf.write_tensors_to_file()
    gguf.close()
    return path


def _further_part(writer: ProjectorWriter, name: str, n_inputs: int, n_embd: int) -> None:
    writer.vector(f"{name}.norm.weight", n_inputs, 1.0)
    writer.vector(f"{name}.norm.bias", n_inputs)
    for part, n in (("fc1", n_inputs), ("fc2", n_embd)):
        writer.matrix(f"{name}.{part}", n, n_inputs)
        writer.vector(f"{name}.{part}.bias", n)


class Uncut(NamedTuple):
    """What one process answers."""

    tokens: list[int]
    logits: np.ndarray
    """f32 [n_tokens, n_vocab], before each token."""
    n_prompt: int


class Question(NamedTuple):
    """What one process is asked: greedy, `n_tokens` tokens."""

    model: Path
    projector: Path
    prompt: str
    """With `<__media__>` for each of the images."""
    images: Sequence[np.ndarray]
    """u8 [height, width, 3]; or u8 [n]: a sound's file."""
    n_tokens: int


def uncut(
    model_path: Path,
    projector_path: Path,
    prompt: str,
    images: Sequence[np.ndarray],
    n_tokens: int,
    n_batch: int = N_BATCH,
) -> Uncut:
    """See `Question`."""
    question = Question(model_path, projector_path, prompt, images, n_tokens)
    return uncut_all([question], n_batch=n_batch)[0]


def uncut_all(questions: Sequence[Question], *, n_batch: int = N_BATCH, **settings: Any) -> list[Uncut]:
    """One answer each, of one process. `settings`: of `vision_reference`."""
    folder = questions[0].projector.parent
    asked = []
    for number, each in enumerate(questions):
        given, found = folder / f"given-{number}.npz", folder / f"found-{number}.npz"
        np.savez(given, *each.images)
        asked.append(
            {
                "model_path": str(each.model),
                "projector_path": str(each.projector),
                "prompt": each.prompt,
                "given": str(given),
                "found": str(found),
                "n_tokens": each.n_tokens,
                "n_batch": n_batch,
                **settings,
            }
        )
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, str(REFERENCE)],
        input=json.dumps(asked).encode(),
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
        # glibc gives zeroed memory then: libmtmd multiplies memory that it has not written with 0 (pixtral).
        env=os.environ | {"PYTHONPATH": paths, "MALLOC_PERTURB_": "255"},
    )
    answers = []
    for number in range(len(questions)):
        with np.load(folder / f"found-{number}.npz") as answer:
            answers.append(Uncut(answer["tokens"].tolist(), answer["logits"], int(answer["n_prompt"])))
    return answers
