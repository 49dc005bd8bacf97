"""The model families that must be exact under any cut, with metadata as llama.cpp's converters write it.

Keys that a converter leaves out are left out here (the pattern of sliding windows, which layers are
recurrent), because that is where a cut goes wrong: libllama then derives them from a layer's number. Sliding
windows are shorter than the tests' prompt. Sizes are small and no power of two where scaling is involved.
"""

from __future__ import annotations

from typing import Final

from .blueprint import Family
from .dense_families import DENSE
from .expert_families import EXPERTS
from .recurrent_families import RECURRENT

FAMILIES: Final[dict[str, Family]] = {**DENSE, **EXPERTS, **RECURRENT}
