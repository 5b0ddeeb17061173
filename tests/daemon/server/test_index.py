"""What is told of the paths of the daemon, and of others."""

from __future__ import annotations

from typing import Any

import pytest


async def test_the_index_lists_what_is_answered(start: Any) -> None:
    daemon = await start("hello", api_key="secret")
    async with daemon.http.get(daemon.url) as response:
        first, _, *lines = (await response.text()).splitlines()
        assert (response.status, first) == (200, "emberd is running")
    assert lines == sorted(lines)
    for path in ("/", "/health", "/metrics", "/v1/experts.html", "/v1/models"):
        assert f"GET  {path}" in lines
        key = {"Authorization": "Bearer secret"}
        async with daemon.http.head(daemon.url + path, headers=key) as response:
            assert response.status == 200
    assert {line for line in lines if line.startswith("POST")} == {
        "POST /v1/chat/completions",
        "POST /v1/completions",
    }


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/v1/embeddings", "not_supported", "emberd has no embeddings"),
        ("/v1/responses", "not_supported", "emberd has no responses: ask /v1/chat/completions"),
        ("/chat/completions", "not_found", "there is no '/chat/completions'; GET / lists"),
        ("/v1/%0Anothing", "not_found", "there is no '/v1/\\nnothing'; GET / lists"),
        ("/" + "x" * 500, "not_found", "there is no '/xxx"),
    ],
)
async def test_paths_that_nothing_answers(start: Any, path: str, code: str, message: str) -> None:
    daemon = await start("hello")
    status, error = await daemon.refusal({"model": "tiny", "input": "x"}, path)
    assert (status, error["code"], error["type"]) == (404, code, "invalid_request_error")
    assert error["message"].startswith(message) and len(error["message"]) < 130


async def test_without_the_key_nobody_is_told_what_is_there(start: Any) -> None:
    daemon = await start("hello", api_key="secret")
    assert (await daemon.refusal({}, "/v1/embeddings"))[0] == 401
