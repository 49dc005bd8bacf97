"""Ten thousand damaged pictures through one process of an encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from encoder_processes import children, pool_in
from hostile_pictures import n_refused
from vision_models import picture, projector, text_model

from swarmllm.models.projector import read_projector
from swarmllm.workerpool import ModelFile

N_DAMAGED = 10_000
SEED = 1


async def test_ten_thousand_damaged_pictures_end_nothing_but_themselves(tmp_path: Path) -> None:
    model = ModelFile("ab" * 32, text_model(tmp_path, "llama"))
    mmproj = read_projector(projector(tmp_path / "mm.gguf", "janus_pro", 64, image=16))
    async with pool_in(tmp_path) as pool:
        before = await pool.encode_picture(model, mmproj, picture(40, 30, 3), is_kept=False)
        (pid,) = children()
        refused = await n_refused(pool, model, mmproj, N_DAMAGED, SEED)
        assert N_DAMAGED // 2 < refused < N_DAMAGED
        after = await pool.encode_picture(model, mmproj, picture(40, 30, 3), is_kept=False)
        assert np.array_equal(before.rows, after.rows)
        assert children() == [pid]
