"""Waits for the daemon, asks it one question and prints the answer: the end of `make demo`."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request

QUESTION = "Set the driver temperature to 23 degrees"
WAIT_SECONDS = 60


def ask(port: int) -> str:
    """The daemon's answer to QUESTION. Raises TimeoutError when no daemon answers."""
    base = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{base}/health"):
                break
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no daemon answered on port {port}") from None
            time.sleep(0.1)
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}]}).encode()
    request = urllib.request.Request(
        f"{base}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    arguments = parser.parse_args()
    print(f"\nyou:    {QUESTION}\nmodel:  {ask(arguments.port)}\n", flush=True)
