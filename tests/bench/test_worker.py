"""Workers: what they answer, and that a slow or failing one is ended."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert

from bench import worker
from bench.worker import Worker, WorkerError

TINY = TinyModel("worker", layers="DA", hidden=64, vocab=64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worker")
    write_checkpoint(folder / "checkpoint", TINY)
    convert(folder / "checkpoint", folder / "converted")
    build(folder / "converted", folder / "artifact", "host", "q4", chunk_sizes=(1, 8))
    return folder / "artifact"


def start(process: Worker, path: Path, streams: int = 1, limit: float = 60) -> worker.Reply:
    return process.call(
        "start", limit, path=str(path), threads=1, context=64, streams=streams, prompt=16
    )


def test_emberd_as_a_worker(artifact: Path) -> None:
    with Worker("emberd") as process:
        first = start(process, artifact, streams=2)
        assert 0 < first.seconds < 60
        for method, count in (("prefill", 20), ("fill", 40), ("decode", 4)):
            reply = process.call(method, 60, count=count)
            assert reply.seconds > 0
            assert reply.cpu_seconds > 0
            assert reply.peak_bytes >= first.peak_bytes > 0
        process.call("clear", 60)
        process.call("prefill", 60, count=64)  # all of the context is free again
        with pytest.raises(WorkerError, match=r"emberd failed in decode .*ContextOverflow"):
            process.call("decode", 60, count=1)


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    with Worker("emberd") as process, pytest.raises(WorkerError, match="emberd failed in start"):
        start(process, tmp_path / "nowhere")


def test_a_slow_worker_is_ended(artifact: Path) -> None:
    with Worker("emberd") as process:
        with pytest.raises(WorkerError, match=r"emberd took more than 0 s for start"):
            start(process, artifact, limit=0.0)
        assert process._process.returncode is not None


def test_a_worker_that_dies_is_noticed() -> None:
    with Worker("emberd") as process:
        process._process.kill()
        with pytest.raises(WorkerError, match="emberd has died"):
            process.call("clear", 60)


class Failing:
    def clear(self) -> float:
        raise ValueError("no")


def test_errors_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    side: Any = Failing()
    worker._serve(side, io.StringIO('["clear", {}]\n["clear", {}]\n'))
    assert json.loads(capsys.readouterr().out) == {"error": "ValueError: no"}


@pytest.mark.usefixtures("llama_cpp")
def test_llama_as_a_worker(tmp_path: Path) -> None:
    from emberd.compile.converted import ConvertedModel

    from bench.peer_file import write

    write_checkpoint(tmp_path / "checkpoint", TINY)
    convert(tmp_path / "checkpoint", tmp_path / "converted")
    write(ConvertedModel.load(tmp_path / "converted"), "f32", tmp_path / "peer.gguf")
    with Worker("peer") as process:
        start(process, tmp_path / "peer.gguf", streams=2)
        for method, count in (("prefill", 20), ("fill", 40), ("decode", 4)):
            assert process.call(method, 60, count=count).seconds > 0
        process.call("clear", 60)
        assert process.call("prefill", 60, count=30).cpu_seconds > 0
