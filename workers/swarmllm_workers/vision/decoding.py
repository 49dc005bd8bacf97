"""Decodes the file of a picture to pixels, within limits that are checked before anything is decoded.

Pillow decodes, not libmtmd: that starts `ffprobe` for what it cannot read itself, knows no WebP, and accepts
a JPEG that ends early. Only the reader of the stated kind is used, whatever the file claims to be.
"""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from PIL import Image, ImageOps

from swarmllm_proto.ipc import EncodePicture, RecodePicture
from swarmllm_proto.limits import PICTURE_PIXELS_MAX, PICTURE_SIDE_MAX
from swarmllm_workers.errors import CallError

_DEEP_MODES: Final = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""16 bits a channel, in one channel: Pillow would cut what is above 255."""
JPEG_QUALITY: Final = 90
_BACKGROUND: Final = (255, 255, 255, 255)

Image.MAX_IMAGE_PIXELS = None  # `_decoded` looks itself, before it loads anything


def pixels_of(message: EncodePicture | RecodePicture, data: memoryview) -> np.ndarray:
    """u8 [height, width, 3], upright as the file's EXIF orientation says, the first frame, over white where
    it is transparent. Raises CallError bad_picture, out_of_memory."""
    try:
        return _decoded(message, data)
    except CallError:
        raise
    except MemoryError:
        raise CallError("out_of_memory", "no memory for this picture", "payload") from None
    except Exception as error:
        # Pillow's readers raise whatever they stumble over: OSError, SyntaxError, struct.error, EOFError ...
        text = f"the {message.kind} file is damaged ({type(error).__name__})"
        raise CallError("bad_picture", text, "payload") from None


def jpeg_of(pixels: np.ndarray) -> bytes:
    """The file of u8 [height, width, 3] as a JPEG."""
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "JPEG", quality=JPEG_QUALITY)
    return written.getvalue()


def smaller_png(pixels: np.ndarray, side_max: int) -> bytes:
    """The file of u8 [height, width, 3] as a PNG, with `side_max` pixels on its longer side, or as many as it
    has."""
    image, written = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((side_max, side_max), Image.Resampling.LANCZOS, reducing_gap=None)
    image.save(written, "PNG")
    return written.getvalue()


def _decoded(message: EncodePicture | RecodePicture, data: memoryview) -> np.ndarray:
    with Image.open(io.BytesIO(data), formats=(message.kind.upper(),)) as image:
        width, height = image.size
        if (width, height) != (message.width, message.height):
            text = f"the picture has {width} x {height} pixels, not {message.width} x {message.height}"
            raise CallError("bad_picture", text, "width")
        if max(width, height) > PICTURE_SIDE_MAX or width * height > PICTURE_PIXELS_MAX:
            text = (
                f"{width} x {height} pixels are more than {PICTURE_PIXELS_MAX}, or than {PICTURE_SIDE_MAX}"
                " on one side"
            )
            raise CallError("bad_picture", text, "width")
        image.load()
        pixels = np.array(_as_rgb(ImageOps.exif_transpose(image)), np.uint8)
    if pixels.ndim != 3 or pixels.shape[2] != 3:
        raise CallError("bad_picture", "the picture has no colours", "payload")
    return np.ascontiguousarray(pixels)


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in _DEEP_MODES:
        values = np.asarray(image, np.float64)
        image = Image.fromarray(np.clip(values / 257, 0, 255).astype(np.uint8), "L")
    if image.has_transparency_data:
        base = Image.new("RGBA", image.size, _BACKGROUND)
        base.alpha_composite(image.convert("RGBA"))
        image = base
    return image.convert("RGB")
