"""Maps are read as they were written; not a byte of a file is believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from activation_maps import random_map
from emberd.daemon.activation_map import (
    MAP_FILE,
    MAX_BYTES,
    SUCCESSORS,
    ActivationMap,
    most_classes,
)
from emberd.daemon.artifact import Artifact
from emberd.daemon.artifact_writer import ArtifactWriter
from emberd.daemon.errors import EmberdError
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TINY_DESCRIPTION, TinyModel

MAP = random_map()
BYTES = MAP.to_bytes()


def test_round_trip(tmp_path: Path) -> None:
    assert ActivationMap.from_bytes(BYTES) == MAP
    (tmp_path / "map").write_bytes(BYTES)
    assert ActivationMap.read(tmp_path / "map").to_bytes() == BYTES


def test_rankings_and_masses_are_those_of_the_counts() -> None:
    for index, entry in enumerate(MAP.classes):
        for layer in range(MAP.layers):
            row = entry.choices[layer * MAP.experts :][: MAP.experts]
            ranking = MAP.ranking(layer, index)
            assert sorted(ranking) == list(range(MAP.experts))
            assert [row[expert] for expert in ranking] == sorted(row, reverse=True)
            assert MAP.mass(layer, index) == [count / (entry.tokens * MAP.top_k) for count in row]
            assert sum(MAP.mass(layer, index)) == pytest.approx(1)
            top = sum(sorted(row, reverse=True)[:3]) / (entry.tokens * MAP.top_k)
            assert MAP.coverage(3, layer, index) == pytest.approx(top)


def test_any_command_is_the_classes_weighted_by_their_priors() -> None:
    assert MAP.priors == [10 / 21, 11 / 21]
    for layer in range(MAP.layers):
        expected = [
            (10 * a + 11 * b) / 21
            for a, b in zip(MAP.mass(layer, 0), MAP.mass(layer, 1), strict=True)
        ]
        assert MAP.mass(layer) == pytest.approx(expected)


def test_the_hottest_come_from_all_layers_most_chosen_first() -> None:
    hottest = MAP.hottest(1000, 1)
    assert sorted(hottest) == [(i, e) for i in range(MAP.layers) for e in range(MAP.experts)]
    masses = [MAP.mass(layer, 1)[expert] for layer, expert in hottest]
    assert masses == sorted(masses, reverse=True)
    assert MAP.hottest(4, 1) == hottest[:4]
    assert MAP.hottest(-1) == []


def test_successors_are_likeliest_first_and_places_unused_are_none() -> None:
    for layer in range(MAP.layers):
        for expert in range(MAP.experts):
            start = (layer * MAP.experts + expert) * SUCCESSORS
            found = MAP.next_layer.after(layer, expert)
            assert [successor for successor, _ in found] == list(
                MAP.next_layer.successors[start : start + 2]
            )
            assert 1 >= found[0][1] >= found[1][1] > 0


def test_a_map_for_40_layers_of_256_experts_fits_the_limit() -> None:
    classes = tuple(f"class {number}" for number in range(16))
    large = random_map(40, 256, 8, classes, tokens=4)
    assert len(large.to_bytes()) <= MAX_BYTES
    assert ActivationMap.from_bytes(large.to_bytes()) == large


@pytest.mark.parametrize(("layers", "experts"), [(40, 256), (48, 512), (1, 2)])
def test_as_many_classes_as_are_promised_fit(layers: int, experts: int) -> None:
    most = min(most_classes(layers, experts), 200)
    assert most > 0
    classes = tuple(f"{number:03}" + "\N{GRINNING FACE}" * 77 for number in range(most))
    data = random_map(layers, experts, 2, classes, tokens=1).to_bytes()
    assert ActivationMap.from_bytes(data).classes[-1].name == classes[-1]


def test_too_many_classes_are_refused() -> None:
    classes = tuple(f"class {number}" for number in range(40))
    with pytest.raises(EmberdError, match="use fewer classes"):
        random_map(40, 256, 8, classes, tokens=2).to_bytes()


def test_a_map_of_another_model_is_refused() -> None:
    MAP.check_model("ab" * 32)
    with pytest.raises(EmberdError, match=r"another model \('abababababab', this one is 'cdcd"):
        MAP.check_model("cd" * 32)
    with pytest.raises(EmberdError, match="this one is of no known identity"):
        MAP.check_model("")


def test_an_unknown_class_names_the_known_ones() -> None:
    assert MAP.index("climate") == 1
    with pytest.raises(EmberdError, match="no class 'media'; it has navigation, climate"):
        MAP.index("media")


def changed(change: Callable[[Any], None]) -> bytes:
    top = msgpack.unpackb(BYTES)
    change(top)
    data: bytes = msgpack.packb(top)
    return data


def put(member: str, value: Any) -> Callable[[Any], None]:
    return lambda top: top.update({member: value})


def put_in_class(member: str, value: Any) -> Callable[[Any], None]:
    return lambda top: top["classes"][1].update({member: value})


CHOICES = msgpack.unpackb(BYTES)["classes"][0]["choices"]
NEXT_LAYER = msgpack.unpackb(BYTES)["next_layer"]


def put_in_transitions(member: str, value: Any) -> Callable[[Any], None]:
    return lambda top: top["next_layer"].update({member: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format", "emberd-artifact"), "not an activation map of emberc profile"),
        (put("version", 2), "version 2, this emberd reads 1"),
        (put("model", 5), "model is not a string"),
        (put("layers", 0), "layers is 0"),
        (put("layers", 2**40), "layers is 1099511627776"),
        (put("layers", 4), "choices is not a table of 32 entries"),
        (put("experts", 2**16 + 1), "experts is 65537"),
        (put("top_k", 9), "top_k is 9, expected an integer from 1 to 8"),
        (put("top_k", 1), "expected 1 different experts for each of 50 tokens"),
        (put("classes", []), "classes are none"),
        (put("classes", {}), "classes is not a list"),
        (put_in_class("name", "navigation"), "a name in common"),
        (put_in_class("name", ""), "not a name"),
        (put_in_class("name", "a\nb"), "not a name"),
        (put_in_class("commands", 0), "commands is 0"),
        (put_in_class("tokens", True), "tokens is True"),
        (put_in_class("tokens", 49), "for each of 49 tokens"),
        (put_in_class("choices", CHOICES[:-4]), "not a table of 24 entries"),
        (put_in_class("choices", b"\xff" * len(CHOICES)), "different experts"),
        (put_in_class("choices", "x" * 96), "not a packed table"),
        (put("next_token", None), "next_token is not a map"),
        (put_in_transitions("shares", NEXT_LAYER["shares"] + b"\0\0"), "next_layer.shares is not"),
        (
            put_in_transitions("successors", b"\x08\0" + NEXT_LAYER["successors"][2:]),
            "next_layer.successors: expert 8 of 8",
        ),
        (put_in_transitions("successors", b"\0"), "packed table of 2-byte entries"),
    ],
)
def test_what_is_wrong_is_named(change: Callable[[Any], None], message: str) -> None:
    with pytest.raises(EmberdError, match=message):
        ActivationMap.from_bytes(changed(change))


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x93", b"\x91" * 5000, BYTES + b"\0"])
def test_what_is_no_map_is_refused(data: bytes) -> None:
    with pytest.raises(EmberdError, match="activation map"):
        ActivationMap.from_bytes(data)


def test_a_file_beyond_the_limit_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "map"
    path.write_bytes(bytes(MAX_BYTES + 1))
    with pytest.raises(EmberdError, match=f"{path}.*more than {MAX_BYTES} bytes"):
        ActivationMap.read(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match="nowhere: cannot be read: No such file"):
        ActivationMap.read(tmp_path / "nowhere")


@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_an_error_or_another_sound_map(position: int, change: int) -> None:
    data = bytearray(BYTES)
    data[position] ^= change
    try:
        found = ActivationMap.from_bytes(bytes(data))
    except EmberdError:
        return
    assert all(sum(found.mass(layer)) == pytest.approx(1) for layer in range(found.layers))
    assert all(
        expert < found.experts
        for layer in range(found.layers)
        for start in range(found.experts)
        for expert, _ in found.next_token.after(layer, start)
    )


def shipped(tiny: TinyModel, folder: Path, data: bytes | None) -> Artifact:
    """An artifact with this for a map."""
    with ArtifactWriter(folder / "artifact", TINY_DESCRIPTION, target="test") as writer:
        tiny.fill(writer)
        writer.set_identity("ab" * 32)
        if data is not None:
            writer.write_file(MAP_FILE, data)
    return Artifact.open(folder / "artifact")


def test_an_artifact_has_its_own_map(tiny: TinyModel, tmp_path: Path) -> None:
    assert ActivationMap.of(shipped(tiny, tmp_path, BYTES)) == MAP
    assert ActivationMap.of(shipped(tiny, tmp_path, None)) is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (replace(MAP, model="cd" * 32).to_bytes(), "made for another model ('cdcdcdcdcdcd'"),
        (BYTES[:-1], "not an activation map of emberc profile, or a damaged one"),
    ],
)
def test_an_artifact_with_a_foreign_or_damaged_map_goes_without(
    tiny: TinyModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    data: bytes,
    reason: str,
) -> None:
    """Case R4."""
    assert ActivationMap.of(shipped(tiny, tmp_path, data)) is None
    assert "going on without a map" in caplog.text and reason in caplog.text
