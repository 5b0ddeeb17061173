"""The peak: measured by as many threads as asked."""

from __future__ import annotations

import pytest

from bench import peak
from bench.peak import VnniPeak, has_vnni

pytestmark = pytest.mark.skipif(not has_vnni(), reason="this processor has no AVX-512 VNNI")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rate_is_operations_by_seconds(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0] * peak.TRIES)
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(clock))
    assert VnniPeak().measure(threads, rounds=3) == 2 * 16 * 64 * 3 * threads / 2.0


def test_the_best_of_a_few_tries_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 0.0, 0.5, *[0.0, 1.0] * (peak.TRIES - 2)])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(clock))
    assert VnniPeak().measure(1, rounds=1) == 2 * 16 * 64 / 0.5
