"""The C functions of the native core (daemon/native/ember.h), loaded and typed through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from emberd.daemon.artifact import EXPERTS, WEIGHTS, Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import BUFFER_FIELDS, ROLES

OK, REFUSED, FAILED = range(3)  # ember_status
ERROR_BYTES = 512


class _Sequence(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("role", ctypes.c_int32),
        ("steps", ctypes.c_char_p),
        ("words", ctypes.c_int64),
    )


class Cost(ctypes.Structure):
    """ember_cost of ember.h."""

    _fields_ = (("calls", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class ExpertLayout(ctypes.Structure):
    """ember_expert_layout of ember.h."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("expert_bytes", ctypes.c_int64),
    )


class ExpertCounters(ctypes.Structure):
    """ember_expert_counters of ember.h."""

    _fields_ = (
        ("hits", ctypes.c_int64),
        ("misses", ctypes.c_int64),
        ("bytes", ctypes.c_int64),
        ("stall_nanoseconds", ctypes.c_int64),
        ("skipped", ctypes.c_int64),
        ("substituted", ctypes.c_int64),
        ("expected", ctypes.c_int64),
        ("expected_used", ctypes.c_int64),
    )


class ExpertWatch(ctypes.Structure):
    """ember_expert_watch of ember.h."""

    _fields_ = (("resident", ctypes.c_void_p), ("chosen", ctypes.c_void_p))


class Trace(ctypes.Structure):
    """ember_trace of ember.h."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
    )


class Row(ctypes.Structure):
    """ember_row of ember.h."""

    _fields_ = (("logits", ctypes.c_void_p), ("bounds", ctypes.c_void_p), ("n", ctypes.c_int64))


class Config(ctypes.Structure):
    """ember_model_config of ember.h."""

    _fields_ = (
        ("kernels", ctypes.c_char_p),
        ("kernels_bytes", ctypes.c_int64),
        ("symbols", ctypes.POINTER(ctypes.c_char_p)),
        ("symbol_count", ctypes.c_int64),
        ("buffers", ctypes.c_char_p),
        ("buffer_count", ctypes.c_int64),
        ("shapes", ctypes.c_char_p),
        ("shape_count", ctypes.c_int64),
        ("sequences", ctypes.POINTER(_Sequence)),
        ("sequence_count", ctypes.c_int64),
        ("tables", ctypes.c_char_p),
        ("tables_bytes", ctypes.c_int64),
        ("scratch_bytes", ctypes.c_int64),
        ("state_bytes", ctypes.c_int64),
        ("kv_bytes_per_token", ctypes.c_int64),
        ("tokens_bytes", ctypes.c_int64),
        ("positions_bytes", ctypes.c_int64),
        ("logits_bytes", ctypes.c_int64),
        ("bounds_bytes", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("vocab_size", ctypes.c_int64),
        ("weights_bytes", ctypes.c_int64),
        ("experts_bytes", ctypes.c_int64),
        ("weights_file", ctypes.c_int32),
        ("experts_file", ctypes.c_int32),
        ("reader_threads", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("cpu_count", ctypes.c_int32),
        ("cpus", ctypes.POINTER(ctypes.c_int32)),
    )


class Merges(ctypes.Structure):
    """ember_vocabulary of ember.h."""

    _fields_ = (
        ("byte_ids", ctypes.c_char_p),
        ("first", ctypes.c_char_p),
        ("merges", ctypes.c_char_p),
        ("tokens", ctypes.c_int32),
        ("merge_count", ctypes.c_int32),
    )


def _load() -> ctypes.CDLL:
    """Loads the core; globally, because kernel libraries find the error function in it.

    What reads a row of logits keeps Python's lock: it takes less time than to get the lock back
    from an event loop that waits for it.
    """
    folder = Path(__file__).with_name("native")
    candidates = [folder / f"_core{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in candidates if path.exists()), None)
    if path is None:
        raise EmberdError(
            f"the native core is not built: no {candidates[0]}; in a clone of emberd, pip install ."
        )
    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    real = ctypes.c_double
    error = (ctypes.c_char_p, ctypes.c_size_t)
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ember_model_open": (pointer, (ctypes.POINTER(Config), *error)),
        "ember_model_close": (None, (pointer,)),
        "ember_model_profile": (None, (pointer, pointer)),
        "ember_model_experts": (ExpertLayout, (pointer,)),
        "ember_model_watch_experts": (None, (pointer, ExpertWatch)),
        "ember_model_set_expert_budget": (ctypes.c_int, (pointer, int64, pointer, *error)),
        "ember_model_least_expert_budget": (int64, (pointer,)),
        "ember_model_break_stalls": (ctypes.c_int, (pointer, int64, ctypes.c_float, *error)),
        "ember_model_prefer_resident": (ctypes.c_int, (pointer, ctypes.c_float, *error)),
        "ember_model_expect_experts": (None, (pointer, ctypes.c_bool)),
        "ember_model_prioritise_experts": (None, (pointer, pointer)),
        "ember_model_warm_experts": (ctypes.c_int, (pointer, pointer, int64, *error)),
        "ember_model_trace": (ctypes.c_int, (pointer, pointer, *error)),
        "ember_session_open": (pointer, (pointer, int64, *error)),
        "ember_session_close": (None, (pointer,)),
        "ember_session_reset": (None, (pointer,)),
        "ember_session_save": (None, (pointer, pointer)),
        "ember_session_load": (None, (pointer, pointer)),
        "ember_session_step": (ctypes.c_int, (pointer, pointer, int32, int64, int32, *error)),
        "ember_model_step": (
            ctypes.c_int,
            (pointer, pointer, pointer, pointer, int32, *error),
        ),
        "ember_vocabulary_check": (ctypes.c_bool, (ctypes.POINTER(Merges),)),
        "ember_vocabulary_encode": (
            int64,
            (ctypes.POINTER(Merges), ctypes.c_char_p, pointer, int64, pointer),
        ),
        "ember_bias": (ctypes.c_int, (Row, pointer, pointer, int64)),
        "ember_mask": (None, (Row, pointer)),
        "ember_expect": (None, (pointer, int32, ExpertLayout, pointer, pointer)),
        "ember_top_k": (int64, (Row, int64, pointer, pointer)),
        "ember_log_sum_exp": (real, (Row,)),
        "ember_draw": (int32, (Row, real, real, int64, real, real)),
    }
    short = ctypes.PyDLL(str(path))
    for name, (result, arguments) in signatures.items():
        function = getattr(short if arguments[0] is Row else library, name)
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    return library


core = _load()


def opened(function: Any, *arguments: Any) -> int:
    """Calls a function of the core that returns a handle, or NULL and a message."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    handle: int | None = function(*arguments, error, ERROR_BYTES)
    if handle is None:
        raise EmberdError(error.value.decode(errors="replace"))
    return handle


def accepted(function: Any, *arguments: Any) -> None:
    """Calls a function of the core that returns a status: OK, or a message."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    if function(*arguments, error, ERROR_BYTES) != OK:
        raise EmberdError(error.value.decode(errors="replace"))


def config(
    artifact: Artifact,
    logits: int,
    bounds: int | None,
    files: Sequence[int],
    threads: int,
    cpus: Sequence[int],
    reader_threads: int,
) -> Config:
    """The core's description of an artifact; it refers to the artifact's own bytes."""
    program = artifact.program
    symbols = [symbol.encode() for symbol in program.symbols]
    sequences = [
        _Sequence(tokens, ROLES.index(role), steps, len(steps) // 4)
        for tokens, role, steps in program.sequences
    ]
    cores = cpus if threads <= len(cpus) else ()
    sizes = program.section_bytes
    return Config(
        kernels=artifact.kernel_library,
        kernels_bytes=len(artifact.kernel_library),
        symbols=(ctypes.c_char_p * len(symbols))(*symbols),
        symbol_count=len(symbols),
        buffers=program.buffers,
        buffer_count=len(program.buffers) // (8 * BUFFER_FIELDS),
        shapes=program.shapes,
        shape_count=len(program.shapes) // 8,
        sequences=(_Sequence * len(sequences))(*sequences),
        sequence_count=len(sequences),
        tables=program.tables,
        tables_bytes=len(program.tables),
        scratch_bytes=sizes["scratch"],
        state_bytes=sizes["state"],
        kv_bytes_per_token=sizes["kv_per_token"],
        tokens_bytes=sizes["tokens"],
        positions_bytes=sizes["positions"],
        logits_bytes=sizes["logits"],
        bounds_bytes=sizes["bounds"],
        logits=logits,
        bounds=bounds,
        vocab_size=artifact.model.vocab_size,
        weights_bytes=artifact.sizes[WEIGHTS],
        experts_bytes=artifact.sizes[EXPERTS],
        weights_file=files[0],
        experts_file=files[1],
        reader_threads=reader_threads,
        threads=threads,
        cpu_count=len(cores),
        cpus=(ctypes.c_int32 * len(cores))(*cores),
    )
