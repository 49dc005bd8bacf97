"""What pyproject.toml cannot say: the worker's pieces of C, plain shared libraries and optional.

Not extension modules: they include no Python header and are loaded with ctypes. Where no compiler is at hand
the build goes on without them: the worker answers the tap's callback and takes rows in Python, more slowly,
and small batches and fused attention are computed as ggml has it. Sampling uses numpy.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"swarmllm_workers._{name}",
            [f"workers/swarmllm_workers/engine/kernels/{source}.c" for source in (name, *others)],
            depends=["workers/swarmllm_workers/engine/kernels/k_quants.h"],
            # Nothing fused in rows that are rounded: the same bits on every processor.
            extra_compile_args=["-O2", *(("-ffp-contract=off",) if name == "row_codec" else ())],
            optional=True,
        )
        for name, *others in (
            ("tap",),
            ("small_batches", "k_quants"),
            ("row_attention",),
            ("lone_row",),
            ("weights",),
            ("row_codec",),
        )
    ]
)
