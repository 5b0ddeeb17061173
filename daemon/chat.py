"""A terminal client for people: it talks to a daemon over HTTP and to nothing else."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

import aiohttp
from emberd.daemon.errors import EmberdError

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


async def talk(url: str, model: str | None, system: str | None) -> None:
    """Read questions until the input ends. Raises EmberdError if there is no daemon at ``url``."""
    chat = Chat(url.rstrip("/"), model, system)
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (history and editing for input())
    # No connection outlives an answer: the loop stands still while a person types.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        name = await chat.find_model(http)
        if interactive:
            print(f"{name}. {HELP}.")
        while (line := _read("> " if interactive else "")) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/help":
                    print(HELP)
                case "/reset":
                    chat.reset()
                case question:
                    await _interruptible(chat.ask(http, question))


class Chat:
    """A conversation and where it is held."""

    def __init__(self, url: str, model: str | None, system: str | None) -> None:
        self._url = url
        self._model = model
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    async def find_model(self, http: aiohttp.ClientSession) -> str:
        """The name of the model that will answer."""
        try:
            async with http.get(f"{self._url}/v1/models") as response:
                names = [model["id"] for model in (await response.json())["data"]]
        except (aiohttp.ClientError, ValueError, KeyError, TypeError) as error:
            raise EmberdError(
                f"no emberd answers at {self._url} ({error}); start one with: emberd serve ARTIFACT"
            ) from None
        if self._model is None:
            return str(names[0])
        if self._model not in names:
            raise EmberdError(f"{self._url} serves {', '.join(names)}, not {self._model}")
        return self._model

    async def ask(self, http: aiohttp.ClientSession, question: str) -> None:
        """Print the answer as it comes; what was said of it when it is stopped stays said."""
        self._messages.append({"role": "user", "content": question})
        body = {"model": self._model, "messages": self._messages, "stream": True}
        answer: list[str] = []
        try:
            async with http.post(f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    raise EmberdError((await response.json())["error"]["message"])
                await self._print(response, answer)
        except (aiohttp.ClientError, EmberdError) as error:
            print(f"error: {error}", file=sys.stderr)
        finally:
            print(PLAIN if sys.stdout.isatty() else "", flush=True)
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()

    async def _print(self, response: aiohttp.ClientResponse, answer: list[str]) -> None:
        thinking = False
        async for event in _events(response):
            if "error" in event:
                raise EmberdError(event["error"]["message"])
            for choice in event["choices"]:
                delta = choice["delta"]
                if text := delta.get("reasoning_content"):
                    thinking = self._switch(thinking, True)
                    print(text, end="", flush=True)
                if text := delta.get("content"):
                    thinking = self._switch(thinking, False)
                    answer.append(text)
                    print(text, end="", flush=True)

    @staticmethod
    def _switch(before: bool, now: bool) -> bool:
        """Set thinking apart from the answer: dimmed on a terminal, on lines of its own."""
        if before != now:
            if before:
                print()
            if sys.stdout.isatty():
                print(DIM if now else PLAIN, end="")
        return now


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The JSON of each server-sent event."""
    buffer = b""
    async for block in response.content.iter_any():
        *lines, buffer = (buffer + block).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ")
            if data != line and data != b"[DONE]":
                yield json.loads(data)


def _read(prompt: str) -> str | None:
    """A line; None at the end of the input. Ctrl-C at the prompt only clears the line."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            return input(prompt)
        except EOFError:
            return None
        except KeyboardInterrupt:
            print()


async def _interruptible(work: Coroutine[Any, Any, None]) -> None:
    """Run until done or until Ctrl-C."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)
