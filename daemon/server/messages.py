"""The messages of a chat: checked, and in the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from emberd.daemon.server.fields import Fields, invalid

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The request's messages, content as one string each. Raises ApiError naming what is wrong."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "expected a list of at least one message")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(where, "expected an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role", f"expected one of {', '.join(ROLES)}")
    content = _content(f"{where}.content", message.get("content"), role)
    reasoning = message.get("reasoning_content")
    if not isinstance(reasoning, str | None):
        raise invalid(f"{where}.reasoning_content", "expected a string")
    known = {name: value for name, value in message.items() if value is not None}
    if "tool_calls" in known:
        known["tool_calls"] = _tool_calls(f"{where}.tool_calls", known["tool_calls"])
    return known | {"role": "system" if role == "developer" else role, "content": content}


def _content(where: str, content: Any, role: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "expected a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            shown = kind if isinstance(kind, str) else "unknown"
            raise invalid(
                f"{where}[{index}]", f"parts of type {shown[:40]!r}: this model takes only text"
            )
        if not isinstance(part.get("text"), str):
            raise invalid(f"{where}[{index}].text", "expected a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Earlier calls: clients send the arguments as JSON text, templates read them as an object."""
    if not isinstance(calls, list):
        raise invalid(where, "expected a list of calls")
    read = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}[{index}]", "expected an object with a function and its name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise invalid(f"{where}[{index}].function.arguments", "expected a JSON object")
        read.append(call | {"function": function | {"arguments": arguments}})
    return read
