"""The checkpoint's chat template, rendered in Jinja's sandbox.

Same environment as transformers' apply_chat_template. A template is part of the artifact, not of a
request, but a faulty one must not hang or fill the daemon: output and time are limited.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from emberd.daemon.errors import EmberdError
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 64 << 20
MAX_SECONDS = 10.0


class TemplateRefusal(EmberdError):  # noqa: N818
    """The template does not take these messages; the text is its own reason."""


class _TimeUp(Exception):  # noqa: N818
    """Raised inside a rendering thread that takes too long."""


class _Generation(Extension):
    """Reads {% generation %} blocks, which mark training targets, as their content."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with repetition limited: 'x' * 10**12 must not fill the memory."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("the operator ** is not allowed in chat templates")
        for sequence, count in ((left, right), (right, left)):
            if (
                isinstance(sequence, str | list | tuple)
                and isinstance(count, int)
                and len(sequence) * count > MAX_CHARACTERS
            ):
                raise jinja2.TemplateError("the rendered text is too long")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source.
        special_tokens: variables such as bos_token that templates may refer to.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises EmberdError where the source is not a template."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise EmberdError(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. Raises TemplateRefusal with the template's reason."""
        names: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **variables,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _within(MAX_SECONDS, lambda: self._collect(names))
        except _TimeUp as error:
            raise TemplateRefusal(f"chat template: took over {MAX_SECONDS:g} s") from error
        except jinja2.TemplateError as error:
            raise TemplateRefusal(str(error)) from error
        except Exception as error:  # whatever a template's expressions raise on odd messages
            raise TemplateRefusal(f"chat template: {error}") from error

    def _collect(self, names: Mapping[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        for part in self._template.generate(names):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARACTERS:
                raise jinja2.TemplateError("the rendered text is too long")
        return "".join(parts)


def _within(seconds: float, function: Callable[[], str]) -> str:
    """``function()``, given up with _TimeUp after ``seconds``.

    It runs in a thread of its own, so that the exception injected into a late one can hit no other
    work.
    """
    result: list[str] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:  # carried to the caller
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name="template")
    thread.start()
    thread.join(seconds)
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeUp)
        )
        raise _TimeUp
    if raised:
        raise raised[0]
    return result[0]
