"""Streamed text equals the text put together afterwards, whatever the tokens' borders."""

from __future__ import annotations

from itertools import pairwise

from emberd.daemon.answer import StopSearch, Utf8Stream
from hypothesis import given
from hypothesis import strategies as st


def _cuts(size: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(cut % (size + 1) for cut in cuts), size]
    return list(pairwise(edges))


@given(st.text(max_size=30), st.lists(st.integers(0, 200), max_size=20), st.integers(0, 3))
def test_characters_come_whole_and_in_order(text: str, cuts: list[int], cut_off: int) -> None:
    data = text.encode()
    data = data[: len(data) - cut_off] if cut_off < len(data) else data
    stream = Utf8Stream()
    pieces = [stream.push(data[a:b]) for a, b in _cuts(len(data), cuts)]
    assert "".join(pieces) == data.decode("utf-8", "ignore")


@given(st.binary(max_size=40), st.lists(st.integers(0, 200), max_size=20))
def test_invalid_bytes_are_dropped_wherever_they_are_cut(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    pieces = [stream.push(data[a:b]) for a, b in _cuts(len(data), cuts)]
    assert "".join(pieces) == data.decode("utf-8", "ignore")
    assert "\ufffd" not in "".join(pieces) or b"\xef\xbf\xbd" in data


def _offline(text: str, stops: list[str]) -> tuple[str, bool]:
    """Reading character by character, end at the first stop string completed."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


small = st.text("ab#", max_size=14)


@given(
    small,
    st.lists(st.text("ab#", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 50), max_size=10),
)
def test_a_stop_string_ends_the_text_wherever_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    expected, found = _offline(text, stops)
    search, streamed = StopSearch(stops), ""
    for a, b in _cuts(len(text), cuts):
        streamed += search.push(text[a:b])
        assert expected.startswith(streamed)
    if not search.found:
        streamed += search.finish()
    assert (streamed, search.found) == (expected, found)
