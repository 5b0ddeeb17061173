"""Steps of the core that fail: the session says why until it is reset."""

from __future__ import annotations

import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from emberd.daemon.program import Step, StepKind

BAD_EXPERT = 13  # a token whose second expert does not exist


def test_an_expert_that_does_not_exist_poisons_the_session(model: Model) -> None:
    with model.open_session(8) as session:
        snapshot = session.snapshot()
        with pytest.raises(EmberdError, match="layer 0 chose expert 4 of 4"):
            session.step([BAD_EXPERT])
        for call in (
            lambda: session.step([1]),
            session.snapshot,
            lambda: session.restore(snapshot),
        ):
            with pytest.raises(EmberdError, match=r"failed before .*reset it"):
                call()
        session.reset()
        session.step([1])


def test_a_bad_expert_table_is_an_error(tiny: Any, tmp_path: Path) -> None:
    program = replace(tiny.program, tables=struct.pack("<4i", 5, 6, 3, 1))
    with (
        Model(Artifact.open(tiny.write(tmp_path / "a", program)), 1) as model,
        model.open_session(8) as session,
        pytest.raises(EmberdError, match="expert 1 is in slot 6 of 6"),
    ):
        session.step([1])


KERNEL_ERROR = """
import sys
for name in sys.argv[2:]:
    __import__(name)
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
with Model(Artifact.open(sys.argv[1]), threads=2) as model, model.open_session(8) as session:
    for _ in range(2):
        try:
            session.step([1])
        except EmberdError as error:
            print(error)
"""


@pytest.mark.parametrize("loaded", [[], ["tvm"], ["emberd.daemon.core", "tvm"]])
def test_a_kernel_that_refuses_its_tensors_says_so(
    tiny: Any, tmp_path: Path, loaded: list[str]
) -> None:
    """On a device without TVM, and in a compiler, where kernels may raise their error in TVM."""
    wrong = tiny.with_steps(1, "logits_last", [Step(StepKind.CALL, 5, (0, 1, 2))])
    path = tiny.write(tmp_path / "wrong", wrong)
    command = [sys.executable, "-c", KERNEL_ERROR, str(path), *loaded]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert first.startswith("kernel head failed: ValueError: Mismatched logits.shape[0]")
    assert second == f"the session failed before ({first}): reset it"


TVM_ERROR = """
import sys
import emberd.daemon.core
import tvm, numpy
head = tvm.runtime.load_module(sys.argv[1])["head"]
shapes = (2, 16), (16, 16), (3, 16)
try:
    head(*(tvm.runtime.tensor(numpy.zeros(shape, "float32")) for shape in shapes))
except ValueError as error:
    print(error)
"""


def test_kernels_of_tvm_keep_their_errors(tiny: Any, tmp_path: Path) -> None:
    """Their library may find the core's function; the error must still reach TVM."""
    (tmp_path / "kernels.so").write_bytes(tiny.kernels)
    command = [sys.executable, "-c", TVM_ERROR, str(tmp_path / "kernels.so")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Mismatched logits.shape[0]" in result.stdout
