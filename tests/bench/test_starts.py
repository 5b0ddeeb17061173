"""The benchmark of starts, on the embedded model."""

from __future__ import annotations

from pathlib import Path

from bench import starts


def test_starts_are_measured_in_turns(demo_artifact: Path) -> None:
    serve = starts.serve_emberd(demo_artifact)
    sides = starts.measure({"one": serve, "other": serve}, samples=2)
    assert list(sides) == ["one", "other"]
    for found in sides.values():
        for listening, token in zip(found.listening, found.exec, strict=True):
            assert 0 < listening < token
        assert len(found.loaded) == len(found.unloaded) == 2
        assert abs(found.prompt - starts.PROMPT) <= 4
        assert len(found.rows()) == 7


def test_the_phases_of_a_start(demo_artifact: Path) -> None:
    names = list(starts.phases(demo_artifact, samples=1))
    assert names[0] == "exec -> configured, ms" and names[-1] == "exec -> first token, ms"
    for thread in (
        ["loading", "artifact checked", "tokenizer read", "template compiled", "model opened"],
        ["imported", "listening", "ready", "request taken", "prompt tokenised"],
    ):
        shown = [f"exec -> {name}, ms" for name in thread]
        assert [name for name in names if name in shown] == shown


def test_an_idle_daemon_is_light(demo_artifact: Path) -> None:
    found = starts.measure({"emberd": starts.serve_emberd(demo_artifact)}, samples=1)["emberd"]
    idle = found.idle
    assert idle.anonymous > 5e6 and idle.files > 2e6
    assert idle.anonymous + idle.files < 45e6, f"an idle daemon weighs {idle} MB, not below 45"
