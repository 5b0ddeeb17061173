"""`emberd chat` as a person uses it, on a pseudo-terminal, and as scripts do, in a pipe."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

CTRL_C, CTRL_D = "\x03", "\x04"
RUN = "import sys; from emberd.daemon.cli import main; sys.exit(main())"
# The child makes its input its controlling terminal: Ctrl-C then reaches it as a signal.
ON_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); " + RUN


class Terminal:
    """The other side of the pseudo-terminal that a process runs on."""

    def __init__(self, process: Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._data = b""
        self._more = asyncio.Event()
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def interrupt(self) -> None:
        """Ctrl-C once the process waits: Python forgets one just before it waits for a key."""
        status = Path(f"/proc/{self.process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "S":
            await asyncio.sleep(0.002)
        self.type(CTRL_C)

    async def expect(self, pattern: str) -> str:
        """Wait until the output has the pattern; the output up to its end, which is then past."""
        async with asyncio.timeout(20):
            while not (match := re.search(pattern.encode(), self._data)):
                self._more.clear()
                await self._more.wait()
        seen, self._data = self._data[: match.end()], self._data[match.end() :]
        return seen.decode()

    async def status(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 20)

    def _read(self) -> None:
        try:
            self._data += os.read(self._descriptor, 1 << 16)
        except OSError:  # the process has ended
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._more.set()


@asynccontextmanager
async def _terminal(url: str, *options: str) -> AsyncIterator[Terminal]:
    master, slave = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ON_TERMINAL, "chat", "--url", url, *options),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "LC_ALL": "C.UTF-8", "TERM": "dumb"},
        start_new_session=True,
    )
    os.close(slave)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        asyncio.get_running_loop().remove_reader(master)
        os.close(master)


async def _piped(url: str, *options: str, stdout: int = PIPE, stderr: int = PIPE) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", RUN, "chat", "--url", url, *options),
        stdin=PIPE,
        stdout=stdout,
        stderr=stderr,
    )


async def test_a_conversation_with_wide_characters(start: Any) -> None:
    daemon = await start("好的 🎉")
    async with _terminal(daemon.url) as terminal:
        await terminal.expect(r"tiny\. /reset .*\r\n> ")
        terminal.type("空调 21°\n")
        assert "空调 21°\r\n好的 🎉" in await terminal.expect("\r\n> ")
        terminal.type("and?\n")
        await terminal.expect("好的 🎉.*\r\n> ")
        slot = max(daemon.service.engine._slots, key=lambda slot: slot.last_used)
        prompt = b"".join(map(daemon.service.tokenizer.literal_bytes, slot.tokens)).decode()
        assert "空调 21°<|im_end|>" in prompt and "assistant\n好的 🎉<|im_end|>" in prompt
        terminal.type(CTRL_D)
        assert await terminal.status() == 0


async def test_thinking_is_dimmed_and_apart(start: Any) -> None:
    daemon = await start("hello</think>world", opened=True)
    async with _terminal(daemon.url) as terminal:
        await terminal.expect("> ")
        terminal.type("x\n")
        await terminal.expect("\x1b\\[2mhello\x1b\\[0m\r\nworld")
        await terminal.expect("> ")


async def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(start: Any) -> None:
    daemon = await start([0], delay=0.002)
    async with _terminal(daemon.url) as terminal:
        await terminal.expect("> ")
        for _ in range(2):
            terminal.type("tell me everything\n")
            await terminal.expect("everything\r\n!!!")
            await terminal.interrupt()
            await terminal.expect("\n> ")
            await daemon.idle()
        await terminal.interrupt()
        assert await terminal.status() == 0
    assert daemon.service.engine.metrics.requests["cancelled"] == 2


async def test_ctrl_c_clears_the_line_first(start: Any) -> None:
    daemon = await start("hello")
    async with _terminal(daemon.url) as terminal:
        await terminal.expect("> ")
        terminal.type("never mind")
        await terminal.expect("never mind")
        await terminal.interrupt()
        await terminal.expect("Ctrl-C again or Ctrl-D leaves\r\n> ")
        terminal.type("x\n")
        assert "hello" in await terminal.expect("\n> ")
        await terminal.interrupt()
        await terminal.expect("leaves\r\n> ")
        await terminal.interrupt()
        assert await terminal.status() == 0


async def test_a_daemon_that_goes_is_one_clear_line(start: Any) -> None:
    daemon = await start([0], delay=0.002)
    async with _terminal(daemon.url) as terminal:
        await terminal.expect("> ")
        terminal.type("go on\n")
        await terminal.expect("!!!")
        await asyncio.to_thread(daemon.service.engine.close)
        await terminal.expect("error: the daemon is shutting down\r\n> ")
        terminal.type("/reset\n")
        await terminal.expect("> ")
        daemon.service.draining = True
        terminal.type("still there?\n")
        await terminal.expect("\r\nerror: the daemon is shutting down\r\n> ")
        terminal.type("/exit\n")
        assert await terminal.status() == 0


async def _silent_server(answer: bytes) -> tuple[asyncio.Server, str]:
    """A server that sends ``answer`` to the first question and then hangs up."""
    models = b'{"data":[{"id":"m"}]}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(models) + models if line.startswith(b"GET") else answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_answers_that_break_off(start: Any) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    begun = b'data: {"choices":[{"delta":{"content":"so"}}]}\n\n'
    for answer, reason in (
        (b"", "no emberd answers"),
        (chunked + b"%x\r\n%s\r\n" % (len(begun), begun), "left before the answer was complete"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 2\r\n\r\nno", "is no emberd"),
        (chunked + b"8\r\ndata: {\n\r\n0\r\n\r\n", "is no emberd"),
    ):
        server, url = await _silent_server(answer)
        async with server:
            process = await _piped(url)
            output, errors = await process.communicate(b"x\ny\n")
        assert process.returncode == 2
        assert reason in errors.decode() and len(errors.decode().splitlines()) == 1
        assert output.strip() in (b"", b"so")


async def test_lines_in_a_pipe_are_questions(start: Any) -> None:
    daemon = await start("hello</think>world", opened=True)
    process = await _piped(daemon.url, "--model", "tiny", "--system", "Be brief.")
    output, errors = await process.communicate(b"first\n\n/reset\nsecond\n/exit\nthird\n")
    assert (output.decode().splitlines(), errors) == (["world", "world"], b"")
    assert process.returncode == 0


@pytest.mark.parametrize("end", ["/", "/v1", "/v1/"])
async def test_a_url_may_end_as_those_of_other_clients_do(start: Any, end: str) -> None:
    daemon = await start("hello")
    output, _ = await (await _piped(daemon.url + end)).communicate(b"x\n")
    assert output.decode().split() == ["hello"]


async def test_a_failure_in_a_pipe_ends_it(start: Any) -> None:
    daemon = await start("hello")
    process = await _piped(daemon.url)
    output, errors = await process.communicate(b"one\n\xff\xfe\nthree\n")
    assert output.decode().split() == ["hello"] and process.returncode == 2
    assert errors.decode().splitlines() == [
        "emberd: error: the body holds a lone surrogate, which is not a character"
    ]


async def test_a_reader_that_leaves_ends_it_quietly(start: Any) -> None:
    daemon = await start([0], delay=0.001)
    read, write = os.pipe()
    process = await _piped(daemon.url, stdout=write)
    os.close(write)
    assert process.stdin is not None
    process.stdin.write(b"tell me everything\n")
    assert await asyncio.to_thread(os.read, read, 3)
    os.close(read)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (1, b"")
    await daemon.idle()


async def test_an_interrupt_in_a_pipe_stops_the_answer(start: Any) -> None:
    daemon = await start([0], delay=0.002)
    process = await _piped(daemon.url)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"tell me everything\n")
    assert await process.stdout.readexactly(3)
    process.send_signal(signal.SIGINT)
    process.stdin.write(b"/help\n")
    process.stdin.close()
    assert b"/reset" in await process.stdout.read()
    assert await process.wait() == 0
    await daemon.idle()


async def test_nobody_there_another_model_or_no_key(start: Any) -> None:
    daemon = await start("hello", api_key="secret")
    for options, reason in (
        (("http://127.0.0.1:9",), "emberd serve ARTIFACT"),
        ((daemon.url,), "the API key is missing or wrong: give it with --api-key"),
        ((daemon.url, "--api-key", "secret", "--model", "gpt"), "serves tiny, not gpt"),
    ):
        process = await _piped(*options, stdout=DEVNULL, stderr=PIPE)
        _, errors = await process.communicate(b"x\n")
        assert process.returncode == 2
        assert reason in errors.decode() and len(errors.decode().splitlines()) == 1
    process = await _piped(daemon.url, "--api-key", "secret", stderr=STDOUT)
    output, _ = await process.communicate(b"x\n")
    assert output.decode().split() == ["hello"]
