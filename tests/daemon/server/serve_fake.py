"""Serves a fake model until a signal, as `emberd serve` would: run by the tests as a process."""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Future
from pathlib import Path

from emberd.compile.tokenizer import compile_tokenizer
from emberd.daemon.config import Config
from emberd.daemon.engine import Engine
from emberd.daemon.server.run import serve
from emberd.daemon.server.service import Service
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import fake_model


def main(delay: float, drain_seconds: float) -> None:
    tokenizer = Tokenizer(compile_tokenizer(fake_model.tokenizer_json()))
    model = fake_model.FakeModel(vocab_size=max(tokenizer.added.values()) + 1, delay=delay)
    service = Service(
        name="tiny",
        engine=Engine(lambda: model, tokenizer, slots=2, max_queue=4),
        tokenizer=tokenizer,
        template=ChatTemplate(fake_model.TEMPLATE, {}),
        stop_tokens=frozenset(),
        config=Config(port=0, drain_seconds=drain_seconds),
    )
    loading: Future[Service] = Future()
    loading.set_result(service)
    asyncio.run(serve(service.config, service.engine.metrics, loading, lambda: service.config))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
