"""Serves a fake model until a signal, as `emberd serve` would: run by the tests as a process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from emberd.daemon.config import Config
from emberd.daemon.engine import Engine
from emberd.daemon.server.keys import Service
from emberd.daemon.server.run import serve
from emberd.daemon.template import ChatTemplate
from emberd.daemon.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))
import fake_model


def main(delay: float, drain_seconds: float) -> None:
    tokenizer = Tokenizer(fake_model.tokenizer_json())
    model = fake_model.FakeModel(vocab_size=max(tokenizer.added.values()) + 1, delay=delay)
    service = Service(
        name="tiny",
        engine=Engine(model, tokenizer, slots=2, context=4096, max_queue=4),
        tokenizer=tokenizer,
        template=ChatTemplate(fake_model.TEMPLATE, {}),
        stop_tokens=frozenset(),
        config=Config(port=0, drain_seconds=drain_seconds),
    )
    asyncio.run(serve(service))


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
