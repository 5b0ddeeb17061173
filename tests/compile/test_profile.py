"""A profile counts what the routers chose, however it was run, and goes on after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from emberd.compile.cli import main
from emberd.compile.predict.network import FORMAT
from emberd.compile.profile import profile
from emberd.compile.residency.commands import CommandReader
from emberd.compile.residency.counts import RoutingCounts
from emberd.compile.residency.next_layer import NextLayerRouters
from emberd.compile.residency.recorder import STREAMS, Recorder
from emberd.compile.residency.trace import Trace
from emberd.daemon.activation_map import ActivationMap
from emberd.daemon.artifact import Artifact
from emberd.daemon.core import Model
from emberd.daemon.errors import EmberdError
from needs import needs

HELDOUT = Path(__file__).parents[2] / "firmware_assets" / "demo" / "heldout.jsonl"
# Runs a profile that saves after every group of commands, and kills itself before the fourth.
KILLED = """
import os, sys
from pathlib import Path
from emberd.compile import profile
from emberd.daemon.artifact import Artifact
profile._SAVE_SECONDS = -1
run, groups = profile.Recorder.run, []
def counted(self, commands):
    groups.append(1)
    if len(groups) == 4:
        os.kill(os.getpid(), 9)
    return run(self, commands)
profile.Recorder.run = counted
artifact, commands, output, trace = map(Path, sys.argv[1:])
profile.profile(Artifact.open(artifact), commands, output, trace, 1)
"""


@pytest.fixture(scope="module")
def artifact(demo_artifact: Path) -> Artifact:
    return Artifact.open(demo_artifact)


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """Some of every class: dialogues without their last answer."""
    path = tmp_path / "commands.jsonl"
    lines = HELDOUT.read_text(encoding="utf-8").splitlines()[::11]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_the_map_and_the_trace_are_of_the_same_run(
    artifact: Artifact, commands: Path, tmp_path: Path
) -> None:
    said = profile(artifact, commands, tmp_path / "map", tmp_path / "trace", 1)
    trace = Trace(tmp_path / "trace")
    counts = RoutingCounts(4, 16, 2)
    for command in trace:
        counts.add(command.command_class, command.ids)
        assert 0 < command.prompt < len(command.ids) <= command.prompt + 64
        assert (np.diff(command.weights.astype(float)) <= 0).all()
        assert command.next_layer is not None
        assert command.next_layer.shape == (len(command.ids) - command.prompt, 3, 4)
    found = ActivationMap.read(tmp_path / "map")
    found.check_model(artifact.model.identity)
    assert trace.header.model == artifact.model.identity
    assert found == counts.to_map(artifact.model.identity)
    assert sum(entry.commands for entry in found.classes) == 37
    assert said.startswith("37 commands, ")


def test_commands_that_run_together_are_routed_as_alone(artifact: Artifact, commands: Path) -> None:
    asked = NextLayerRouters(artifact)
    with Model(asked.artifact, 1) as model:
        read = list(CommandReader(artifact, model.max_context).read(commands))[: STREAMS + 2]
        recorder = Recorder(model, artifact.model.stop_tokens, 20, asked)
        together = [*recorder.run(read[:STREAMS]), *recorder.run(read[STREAMS:])]
        for command, expected in zip(read, together, strict=True):
            (alone,) = recorder.run([command])
            np.testing.assert_array_equal(alone.ids, expected.ids)
            np.testing.assert_array_equal(alone.weights, expected.weights)
            np.testing.assert_array_equal(alone.next_layer, expected.next_layer)


def test_a_killed_profile_goes_on(artifact: Artifact, commands: Path, tmp_path: Path) -> None:
    profile(artifact, commands, tmp_path / "whole", tmp_path / "whole.trace", 1)
    files = [artifact.path, commands, tmp_path / "map", tmp_path / "trace"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, files)])
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "map.profile").exists() and not (tmp_path / "map").exists()

    with pytest.raises(EmberdError, match=r"map\.profile is where a run with another artifact"):
        profile(artifact, commands, tmp_path / "map", tmp_path / "trace", 1, max_tokens=3)
    said = profile(artifact, commands, tmp_path / "map", tmp_path / "trace", 1)
    assert said.startswith(f"{37 - 3 * STREAMS} commands, ")
    assert (tmp_path / "map").read_bytes() == (tmp_path / "whole").read_bytes()
    assert (tmp_path / "trace").read_bytes() == (tmp_path / "whole.trace").read_bytes()
    assert not (tmp_path / "map.profile").exists()


def test_a_network_is_trained_on_what_was_recorded(
    artifact: Artifact, commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs("torch")
    arguments = ["profile", str(artifact.path), "--commands", str(commands), "--threads", "1"]
    arguments += ["-o", str(tmp_path / "map"), "--train", str(tmp_path / "network.onnx")]
    assert main(arguments) == 2
    assert "say with --trace" in capsys.readouterr().err
    arguments += ["--trace", str(tmp_path / "trace"), "--steps"]
    assert main([*arguments, "0"]) == 2
    assert "--steps 0: expected 1 or more" in capsys.readouterr().err
    assert main([*arguments, "2"]) == 0
    written = capsys.readouterr().out.splitlines()[-1]
    assert written.endswith("trace, " + str(tmp_path / "network.onnx"))
    about = {
        entry.key: entry.value for entry in onnx.load(tmp_path / "network.onnx").metadata_props
    }
    assert (about["format"], about["model"]) == (FORMAT, artifact.model.identity)
    assert not (tmp_path / "map.profile").exists()


def test_a_state_that_is_damaged_is_named(
    artifact: Artifact, commands: Path, tmp_path: Path
) -> None:
    (tmp_path / "map.profile").write_bytes(b"half a state")
    with pytest.raises(EmberdError, match=r"map\.profile: not readable .*: remove it"):
        profile(artifact, commands, tmp_path / "map", threads=1)


def test_errors_are_one_line_and_leave_nothing(
    demo_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = tmp_path / "commands.jsonl"
    arguments = ["profile", str(demo_artifact), "--commands", str(commands), "-o"]
    output = tmp_path / "map"
    for text, message in (
        ("", "no commands"),
        (json.dumps({"class": "a", "prompt": "x"}) + "\n{", "line 2: not JSON"),
        (
            "\n".join(json.dumps({"class": f"c{number}", "prompt": "x"}) for number in range(4000)),
            "4000 classes, but a map of this model holds",
        ),
    ):
        commands.write_text(text)
        assert main([*arguments, str(output)]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert main([*arguments, str(output), "--max-tokens", "-1"]) == 2
    assert "--max-tokens -1" in capsys.readouterr().err
    commands.write_text(json.dumps({"class": "a", "prompt": "x"}))
    assert main([*arguments, str(tmp_path)]) == 2
    assert "no regular file" in capsys.readouterr().err
    assert not output.exists()
