"""The one thing pyproject.toml cannot say: the worker's C tap, a plain shared library that is optional.

Not an extension module: it includes no Python header and is loaded with ctypes. Where no compiler is at hand
the build goes on without it and the worker answers the same callback in Python, more slowly.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "swarmllm_workers._tap",
            ["workers/swarmllm_workers/tap.c"],
            extra_compile_args=["-O2"],
            optional=True,
        )
    ]
)
