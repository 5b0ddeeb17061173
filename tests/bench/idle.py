"""What an idle daemon uses of a core: `python -m bench.idle ARTIFACT`.

Counted by the system, of a real process that has answered and then waits, with its model loaded
and with it unloaded.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from bench.servers import EmberdServer

MUST = 0.3  # percent of a core
_SETTLE_SECONDS = 2.0
_TICK = 1 / os.sysconf("SC_CLK_TCK")


def measure(artifact: Path, seconds: float) -> dict[str, float]:
    """Percent of a core, over so many seconds, by what the daemon has in memory."""
    found = {}
    for name, keep_alive in (("model loaded", -1.0), ("model unloaded", 0.5)):
        with EmberdServer(artifact, keep_alive=keep_alive) as server:
            server.connect()
            server.ask("a")
            if keep_alive > 0:
                server.wait_until_unloaded()
            time.sleep(_SETTLE_SECONDS)
            before, start = _cpu_seconds(server.process.pid), time.perf_counter()
            time.sleep(seconds)
            used = _cpu_seconds(server.process.pid) - before
            found[name] = 100 * used / (time.perf_counter() - start)
    return found


def _cpu_seconds(pid: int) -> float:
    """That all threads of a process have used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.idle", description=__doc__.splitlines()[0])
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    arguments = parser.parse_args()
    print("| idle daemon | % of a core | must |\n|---|---|---|")
    for name, percent in measure(arguments.artifact, arguments.seconds).items():
        print(f"| {name} | {percent:.2f} | < {MUST} |")


if __name__ == "__main__":
    main()
