"""Builds the native core (C11) beside the Python package; everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "emberd.daemon.native._core",
            sources=[
                "daemon/native/acquire.c",
                "daemon/native/ahead.c",
                "daemon/native/draw.c",
                "daemon/native/expect.c",
                "daemon/native/guard.c",
                "daemon/native/library.c",
                "daemon/native/memory.c",
                "daemon/native/model.c",
                "daemon/native/pool.c",
                "daemon/native/program.c",
                "daemon/native/reader.c",
                "daemon/native/reads.c",
                "daemon/native/reroute.c",
                "daemon/native/residency.c",
                "daemon/native/routing.c",
                "daemon/native/run.c",
                "daemon/native/sampling.c",
                "daemon/native/session.c",
                "daemon/native/slots.c",
                "daemon/native/stall.c",
                "daemon/native/store.c",
                "daemon/native/tensors.c",
                "daemon/native/vocabulary.c",
                "daemon/native/weigh.c",
            ],
            depends=[
                "daemon/native/ember.h",
                "daemon/native/internal.h",
                "daemon/native/row.h",
                "daemon/native/store.h",
                "daemon/native/tvm_abi.h",
            ],
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-ffp-contract=off",
                "-fno-trapping-math",
                "-fvisibility=hidden",
            ],
            libraries=["m", "dl", "pthread"],
        )
    ]
)
