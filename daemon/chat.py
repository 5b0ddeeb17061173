"""A terminal client for people: it talks to a daemon over HTTP and to nothing else.

On a terminal, Ctrl-C stops an answer, and a second one leaves. In a pipe, every line is a question,
answers go to the output without the thinking, and the first failure ends the program.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
from emberd.daemon.errors import EmberdError

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


async def talk(
    url: str, model: str | None = None, system: str | None = None, api_key: str | None = None
) -> None:
    """Read questions until the input ends. Raises EmberdError if there is no daemon at ``url``,
    which may end in /v1, as OpenAI's clients have it."""
    if not url.startswith(("http://", "https://")):
        raise EmberdError(f"--url {url}: it has to start with http:// or https://")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    chat = Chat(url.rstrip("/").removesuffix("/v1"), model, system, terminal)
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  (history and editing for input())
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # No connection outlives an answer: the loop stands still while a person types.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as http:
        name = await chat.find_model(http)
        if terminal:
            print(f"{name}. {HELP}.")
        interrupted = False
        while (line := _read("> " if terminal else "", interrupted)) is not None:
            interrupted = False
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
                    try:
                        interrupted = await _interruptible(chat.ask(http, question))
                    except EmberdError as error:
                        if not terminal:
                            raise
                        print(f"error: {error}", file=sys.stderr)


class Chat:
    """A conversation and where it is held; on a terminal its thinking is shown too."""

    def __init__(self, url: str, model: str | None, system: str | None, terminal: bool) -> None:
        self._url = url
        self._model = model
        self._system = system
        self._terminal = terminal
        self._messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    async def find_model(self, http: aiohttp.ClientSession) -> str:
        """The name of the model that will answer."""
        with self._explained():
            async with http.get(f"{self._url}/v1/models") as response:
                body = await response.json()
                if response.status == 401:
                    raise EmberdError(f"{body['error']['message']}: give it with --api-key")
                if response.status != 200:
                    raise EmberdError(body["error"]["message"])
                names = [str(model["id"]) for model in body["data"]]
        if self._model is None:
            return names[0]
        if self._model not in names:
            raise EmberdError(f"{self._url} serves {', '.join(names)}, not {self._model}")
        return self._model

    async def ask(self, http: aiohttp.ClientSession, question: str) -> None:
        """Print the answer as it comes; what was said of it when it is stopped stays said."""
        self._messages.append({"role": "user", "content": question})
        body = {"model": self._model, "messages": self._messages, "stream": True}
        answer: list[str] = []
        try:
            with self._explained():
                async with http.post(f"{self._url}/v1/chat/completions", json=body) as response:
                    if response.status != 200:
                        raise EmberdError((await response.json())["error"]["message"])
                    await self._print(response, answer)
        finally:
            print(PLAIN if self._terminal else "", flush=True)
            if answer:
                self._messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self._messages.pop()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what the HTTP client raises into an EmberdError a person can act on."""
        try:
            yield
        except aiohttp.ClientConnectionError:
            raise EmberdError(
                f"no emberd answers at {self._url}; start one with: emberd serve ARTIFACT"
            ) from None
        except aiohttp.ClientPayloadError:
            raise EmberdError(f"{self._url} left before the answer was complete") from None
        except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
            raise EmberdError(f"what answers at {self._url} is no emberd ({error})") from None

    async def _print(self, response: aiohttp.ClientResponse, answer: list[str]) -> None:
        thinking = False
        async for event in _events(response):
            if "error" in event:
                raise EmberdError(event["error"]["message"])
            for choice in event["choices"]:
                delta = choice["delta"]
                text = delta.get("reasoning_content")
                if text and self._terminal:
                    thinking = self._switch(thinking, True)
                    print(text, end="", flush=True)
                if text := delta.get("content"):
                    thinking = self._switch(thinking, False)
                    answer.append(text)
                    print(text, end="", flush=True)

    @staticmethod
    def _switch(before: bool, now: bool) -> bool:
        """Set thinking apart from the answer: dimmed, on lines of its own."""
        if before != now:
            print(DIM if now else f"{PLAIN}\n", end="")
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


def _read(prompt: str, interrupted: bool) -> str | None:
    """A line; None at the end of the input.

    Ctrl-C clears the line; a second one, or one after another that stopped an answer, is an end.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            return input(prompt)
        except EOFError:
            break
        except KeyboardInterrupt:
            if interrupted:
                break
            interrupted = True
            print("\nCtrl-C again or Ctrl-D leaves")
    if prompt:
        print()
    return None


async def _interruptible(work: Coroutine[Any, Any, None]) -> bool:
    """Run until done or until Ctrl-C; True after Ctrl-C."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False
