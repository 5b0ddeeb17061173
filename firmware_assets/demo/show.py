"""`make demo`: starts the daemon on an artifact and asks it one question.

The daemon then stays in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

QUESTION = "Set the driver temperature to 23 degrees"


def ask(url: str) -> str:
    """The answer to QUESTION of the daemon at `url`. Raises OSError when there is none."""
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}]}).encode()
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def main() -> int:
    """Exit status: the daemon's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--port", default="8080")
    arguments = parser.parse_args()
    serve = [sys.executable, "-m", "emberd.daemon.cli", "serve", arguments.artifact]
    daemon = subprocess.Popen([*serve, "--port", arguments.port], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    # Ctrl-C reaches the daemon too: it ends, and then so does this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: daemon.terminate())
    ready = daemon.stdout.readline().strip()  # "emberd: NAME on URL", once it listens
    if ready:
        print(f"{ready} (Ctrl-C ends it)\n\nyou:    {QUESTION}", flush=True)
        try:
            print(f"model:  {ask(ready.rpartition(' ')[2])}\n", flush=True)
        except OSError as error:
            print(f"no answer: {error}", file=sys.stderr)
            daemon.terminate()
    return daemon.wait()


if __name__ == "__main__":
    sys.exit(main())
