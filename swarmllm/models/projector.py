"""Projectors (mmproj): the encoder of a model's pictures, or of its sounds, a GGUF file of its own that is
attached to the model.

A projector is no part of the model's manifest, and the ModelId does not cover it: a model is the same with
and without one, its layers are interchangeable between nodes that have a projector and nodes that have none,
and several projectors fit the same text model. It has an identity of its own, the BLAKE3 of its whole file.

Each family is supported by name. The others want what no pipeline does yet, or nobody has compared them with
libmtmd; they are refused when they are added, because a picture that is encoded almost rightly gives answers
that are wrong and look right.

Functions with a `database` work inside the catalogue's transactions. Everything here blocks.
"""

from __future__ import annotations

import os
import re
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm.errors import BadModel
from swarmllm.models.gguf_header import GgufHeader, HeaderTensor, read_header
from swarmllm.models.manifest import Count, Digest, Manifest
from swarmllm_proto.identifiers import ModelId

TABLE = """
CREATE TABLE IF NOT EXISTS projectors (
    model_id TEXT PRIMARY KEY,
    projector BLOB NOT NULL
) STRICT
"""

STATES_TABLE = """
CREATE TABLE IF NOT EXISTS projector_states (
    model_id TEXT PRIMARY KEY,
    state TEXT NOT NULL
) STRICT
"""
ProjectorState = Literal["on_demand", "loaded", "unloaded"]
"""on_demand: opened when a picture comes. loaded: by its user, and kept open. unloaded: by its user; the
model has none here until it is loaded again."""

_WIDTHS: Final = {
    "mlp": ("mm.2.weight", 1),
    "janus_pro": ("mm.1.bias", 0),
    "idefics3": ("mm.model.fc.weight", 1),
    "internvl": ("mm.model.mlp.3.weight", 1),
    "pixtral": ("mm.2.weight", 1),
    "adapter": ("adapter.linear.dense_4h_to_h.weight", 1),
    "dots_ocr": ("mm.2.weight", 1),
    "kimivl": ("mm.2.weight", 1),
    "ldpv2": ("mm.model.peg.0.bias", 0),
    "lfm2": ("mm.2.weight", 1),
    "lightonocr": ("mm.2.weight", 1),
    "llama4": ("mm.model.fc.weight", 1),
    "phi4": ("mm.2.weight", 1),
    "resampler": ("resampler.proj.weight", 0),
    "qwen2vl_merger": ("mm.2.weight", 1),
    "qwen2.5vl_merger": ("mm.2.weight", 1),
    "gemma3": ("mm.input_projection.weight", 0),
    "qwen3vl_merger": ("mm.2.weight", 1),
}
"""Supported families that see: the tensor, and the dimension of it, that has the width of the rows."""
_SOUND_WIDTHS: Final = {
    "ultravox": ("mm.a.mlp.2.weight", 1),
    "voxtral": ("mm.a.mlp.2.weight", 1),
    "qwen2a": ("mm.a.fc.weight", 1),
    "glma": ("mm.a.mlp.2.weight", 1),
    "musicflamingo": ("mm.a.mlp.2.weight", 1),
    "qwen3a": ("mm.a.mlp.2.weight", 1),
}
"""Those that hear, likewise."""
FAMILIES: Final = frozenset(_WIDTHS)
SOUND_FAMILIES: Final = frozenset(_SOUND_WIDTHS)
Takes: TypeAlias = frozenset[Literal["picture", "sound"]]
_MINICPMV_VERSIONS: Final = (3, 4, 5, 6, 100045)
"""Of `resampler`: those with one graph and the same tokens around tiles."""
_SEVERAL_POSITIONS: Final = "its rows have several positions each (M-RoPE)"
_SEES_LATER: Final = "its rows see later ones of the same picture"
_REFUSED: Final = {
    **dict.fromkeys(
        (
            "glm4v",
            "glm5v",
            "paddleocr",
            "ling3vl",
            "mimovl",
            "minimax_m3",
        ),
        _SEVERAL_POSITIONS,
    ),
    "hunyuanvl": _SEVERAL_POSITIONS,
    "granite4_vision": "its rows go into several layers (deepstack)",
    **dict.fromkeys(("gemma4uv", "deepseek4v"), _SEES_LATER),
    "gemma3nv": "the text model has inputs in each layer",
    "gemma4v": f"{_SEES_LATER}, and the text model has inputs in each layer",
}
TEXT_ARCHITECTURES: Final = frozenset(
    (
        *("chatglm", "deepseek2", "gemma", "gemma3", "granite", "lfm2", "llama", "llama4", "mistral3"),
        *("phi3", "qwen2", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"),
    )
)
"""Of text models whose pipelines were compared with libmtmd: they take nothing but rows."""
_OWN_MODELS: Final = {
    "qwen2vl_merger": {"qwen2vl"},
    "qwen2.5vl_merger": {"qwen2vl"},
    "qwen3vl_merger": {"qwen3vl", "qwen3vlmoe"},
    "gemma3": {"gemma3"},
}
"""Families whose rows stand on a grid or see each other, and the architectures that are made for them;
neither goes with another."""
ON_GRID: Final = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe"})
SEEING: Final = frozenset({"gemma3"})
"""Architectures that have the rows of a picture on a grid (M-RoPE), and that let them see each other."""
_QUANTISATION: Final = re.compile(r"[-_.](f16|f32|bf16|fp16|fp32|i?q\d\w*)$")
_DEEPSTACK: Final = re.compile(r"v\.deepstack\.\d+\.fc2\.weight")
"""Makes a further part of each row, which a layer of the text model of its own takes."""
_GGUF: Final = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_FOUND_MAX: Final = 4096
CHUNK_BYTES: Final = 2**22


class Projector(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    size_bytes: Count
    mtime_ns: int
    blake3: Digest
    """Of the whole file."""
    family: Annotated[str, Meta(max_length=64)]
    """`clip.projector_type`."""
    n_embd: Count
    """Width of the rows that it makes, with all of their parts."""

    @property
    def takes(self) -> Takes:
        return frozenset({"sound"}) if self.family in SOUND_FAMILIES else frozenset({"picture"})

    def check_file(self) -> None:
        """Raises BadModel where the file is not as it was. Blocking."""
        try:
            found = Path(self.path).stat()
        except OSError as error:
            raise BadModel(f"the projector {self.path} cannot be read: {error.strerror}") from error
        if (found.st_size, found.st_mtime_ns) != (self.size_bytes, self.mtime_ns):
            raise BadModel(f"the projector {self.path} has changed since it was added")


def read_projector(path: Path, progress: Callable[[int, int], None] | None = None) -> Projector:
    """Parse the header, and hash the file. Raises BadModel, also for a family that is not supported."""
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would otherwise never return.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=2**20) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise BadModel(f"{path} is not a regular file", field="mmproj")
            family, n_embd = parse_projector(read_header(file))
            digest, n_done = blake3(), 0
            file.seek(0)
            while data := file.read(CHUNK_BYTES):
                digest.update(data)
                n_done += len(data)
                if progress is not None:
                    progress(n_done, found.st_size)
    except OSError as error:
        raise BadModel(f"{path} cannot be read: {error.strerror or error}", field="mmproj") from error
    except BadModel as error:
        raise BadModel(f"{path.name}: {error.message}", field="mmproj") from error
    return Projector(
        path=str(path),
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        blake3=digest.hexdigest(),
        family=family,
        n_embd=n_embd,
    )


def parse_projector(header: GgufHeader) -> tuple[str, int]:
    """Family and width. Raises BadModel."""
    architecture = header.text("general.architecture")
    if architecture != "clip":
        raise BadModel(f"this is a model of architecture {architecture[:64]!r}, not a projector (clip)")
    sees, hears = (_has_encoder(header, kind) for kind in ("vision", "audio"))
    if not (sees or hears):
        raise BadModel("this projector encodes neither pictures nor sounds")
    own_key = f"clip.{'vision' if sees else 'audio'}.projector_type"
    named = [key for key in ("clip.projector_type", own_key) if key in header.keys]
    family = header.text(named[0] if named else "clip.projector_type")
    widths = _WIDTHS if sees else _SOUND_WIDTHS
    if family not in widths:
        reason = _REFUSED.get(family, "nobody has compared it with libmtmd")
        known = ", ".join(sorted(widths))
        raise BadModel(
            f"projectors of the family {family[:64]!r} are not supported: {reason} (known: {known})"
        )
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if family == "mlp" and "mm.3.weight" in tensors:
        raise BadModel("projectors of the family 'mlp' with a norm are not supported")
    if family == "resampler":
        version = header.keys.get("clip.minicpmv_version")
        if version is None or version.value not in _MINICPMV_VERSIONS:
            raise BadModel("projectors of MiniCPM-V before 2.6 are not supported: nobody has compared them")
    if family != "mlp" and "clip.vision.image_grid_pinpoints" in header.keys:
        raise BadModel(f"projectors of the family {family!r} that cut pictures into tiles are not supported")
    n_parts = 1
    if family == "qwen3vl_merger":
        n_parts += sum(_DEEPSTACK.fullmatch(name) is not None for name in tensors)
    return family, n_parts * _width(tensors, *widths[family])


def _has_encoder(header: GgufHeader, kind: str) -> bool:
    found = header.keys.get(f"clip.has_{kind}_encoder")
    return found is not None and found.value is True


def _width(tensors: dict[str, HeaderTensor], name: str, dimension: int) -> int:
    tensor = tensors.get(name)
    if tensor is None or len(tensor.shape) <= dimension:
        raise BadModel(f"tensor {name} is missing, or has another shape")
    return tensor.shape[dimension]


def require_fit(projector: Projector, manifest: Manifest) -> None:
    """That this projector's rows are what the model's layers take. Raises BadModel."""
    require_header_fits(Path(projector.path).name, projector.family, projector.n_embd, manifest)


def require_header_fits(name: str, family: str, n_embd: int, manifest: Manifest) -> None:
    """`require_fit` by what a projector's header says: its family, and rows of `n_embd` numbers. Raises
    BadModel that calls it `name`."""
    if n_embd != manifest.n_embd_input:
        raise BadModel(
            f"{name} makes rows of {n_embd} numbers, the model's have {manifest.n_embd_input}:"
            " it is another model's projector",
            field="mmproj",
        )
    if manifest.architecture not in TEXT_ARCHITECTURES:
        known = ", ".join(sorted(TEXT_ARCHITECTURES))
        raise BadModel(
            f"models of architecture {manifest.architecture} take no pictures here yet (known: {known})",
            field="mmproj",
        )
    own, is_others = _OWN_MODELS.get(family), set().union(*_OWN_MODELS.values())
    if manifest.architecture not in (own or ()) and (own or manifest.architecture in is_others):
        raise BadModel(
            f"{name} is of the family {family!r}, whose rows stand otherwise than those of"
            f" {manifest.architecture} models do",
            field="mmproj",
        )
    if not manifest.cut_alignment:
        raise BadModel(
            f"a model that can only run whole takes no pictures ({manifest.whole_reason})", field="mmproj"
        )


def found_beside(model: Path) -> Path | None:
    """The projector that is called like the model's file, but for quantisation and the word mmproj, in the
    same folder; None also where there are several."""
    try:
        names = [each.name for _, each in zip(range(_FOUND_MAX), model.parent.iterdir(), strict=False)]
    except OSError:
        return None
    found = [name for name in names if "mmproj" in name.lower() and is_called_like(name, model.name)]
    return model.with_name(found[0]) if len(found) == 1 else None


def is_called_like(name: str, model_file: str) -> bool:
    """Whether the names of a projector's and of a model's file differ in nothing but quantisation and the
    word mmproj; folders do not count."""
    return _bare(name.rpartition("/")[2]) == _bare(model_file.rpartition("/")[2])


def quantisation_in(name: str) -> str:
    """Of a projector's file, in lower case; empty: its name does not say it."""
    found = _QUANTISATION.search(_GGUF.sub("", name.lower()))
    return found[1] if found else ""


def _bare(name: str) -> str:
    stem = _GGUF.sub("", name.lower())
    stem = re.sub(r"[-_.]?mmproj[-_.]?", "-", stem).strip("-_.")
    return _QUANTISATION.sub("", stem)


def keep(database: sqlite3.Connection, model_id: ModelId, projector: Projector) -> None:
    """In the place of another one that the model has; it is opened on demand."""
    drop(database, model_id)
    database.execute("INSERT INTO projectors VALUES (?, ?)", (model_id, msgspec.msgpack.encode(projector)))


def set_state(database: sqlite3.Connection, model_id: ModelId, state: ProjectorState) -> None:
    database.execute("INSERT OR REPLACE INTO projector_states VALUES (?, ?)", (model_id, state))


def state_of(database: sqlite3.Connection, model_id: ModelId) -> ProjectorState:
    row = database.execute("SELECT state FROM projector_states WHERE model_id = ?", (model_id,)).fetchone()
    return msgspec.convert(row[0], ProjectorState) if row else "on_demand"


def of_model(database: sqlite3.Connection, model_id: ModelId) -> Projector | None:
    row = database.execute("SELECT projector FROM projectors WHERE model_id = ?", (model_id,)).fetchone()
    return msgspec.msgpack.decode(row[0], type=Projector) if row else None


def drop(database: sqlite3.Connection, model_id: ModelId) -> None:
    for table in ("projectors", "projector_states"):
        database.execute(f"DELETE FROM {table} WHERE model_id = ?", (model_id,))
