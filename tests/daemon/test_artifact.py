"""Artifacts are read only when they are exactly what was written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emberd.daemon import artifact as artifact_module
from emberd.daemon.artifact import Artifact
from emberd.daemon.errors import EmberdError
from emberd.daemon.machine import ELF_MACHINES, machine
from emberd.daemon.program import Program
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_artifact import DESCRIPTION, PROGRAM, elf, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def edit_manifest(path: Path, change: Callable[[Any], None]) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    change(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_round_trip(path: Path) -> None:
    artifact = Artifact.open(path)
    assert artifact.model == DESCRIPTION
    assert (artifact.target, artifact.expert_policy) == ("some-box", "lru")
    assert artifact.kernels.isa == "plain"
    assert artifact.kernel_library == elf()
    assert Program.decode(artifact.program) == PROGRAM
    assert artifact.read("tokenizer.json") == b'{"model": 1}'
    assert artifact.sizes["weights.bin"] == 1004
    assert artifact.has("tokenizer.json")
    assert not artifact.has("chat_template.jinja")
    artifact.verify_weights()
    with pytest.raises(EmberdError, match=r"has no chat_template\.jinja"):
        artifact.read("chat_template.jinja")
    with open(artifact.open_file("weights.bin"), "rb") as file:  # noqa: PTH123
        assert file.read() == bytes(1000) + b"abcd"


def test_a_manifest_need_not_name_a_policy(path: Path) -> None:
    edit_manifest(path, lambda manifest: manifest.pop("expert_policy"))
    assert Artifact.open(path).expert_policy == ""


@pytest.mark.parametrize("name", ["manifest.json", "weights.bin", "tokenizer.json"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_refused(
    path: Path, name: str, make: Callable[[Path], None]
) -> None:
    (path / name).unlink()
    make(path / name)
    with pytest.raises(EmberdError, match=f"{name}: not a regular file"):
        Artifact.open(path)


def test_the_first_variant_that_fits_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m", {"best": ["fma", "amx"], "good": ["fma"], "plain": []})
    for features, isa in (({"fma", "amx"}, "best"), ({"fma"}, "good"), (set(), "plain")):
        monkeypatch.setattr(artifact_module, "cpu_features", lambda f=features: frozenset(f))
        assert Artifact.open(path).kernels.isa == isa


def test_no_variant_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m", {"best": ["fma", "amx"], "good": ["avx2", "fma"]})
    monkeypatch.setattr(artifact_module, "cpu_features", lambda: frozenset({"fma"}))
    with pytest.raises(EmberdError, match="best needs amx; good needs avx2"):
        Artifact.open(path)


def test_another_machine(tmp_path: Path) -> None:
    other = next(name for name in ELF_MACHINES.values() if name != machine())
    path = write(tmp_path / "m", library=elf(other))
    expected = rf"built for target some-box \({other}\), this machine is {machine()}"
    with pytest.raises(EmberdError, match=expected):
        Artifact.open(path)


def test_a_kernel_library_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(EmberdError, match="not a 64-bit little-endian ELF library"):
        Artifact.open(write(tmp_path / "m", library=b"text"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="zip"), "format 'zip'"),
        (lambda m: m.update(version=2), "version 2, this emberd reads 1"),
        (lambda m: m.update(abi=7), "abi 7, this emberd reads 1"),
        (lambda m: m.pop("model"), "model is not a map"),
        (lambda m: m["model"].update(vocab_size=0), "vocab_size is 0"),
        (lambda m: m["model"].update(layers=True), "layers is True"),
        (lambda m: m["model"].update(name=5), r"model\.name is not a string"),
        (lambda m: m["model"].update(stop_tokens=[100]), r"stop_tokens\[0\] is 100"),
        (lambda m: m["model"].update(stop_tokens=3), "stop_tokens is not a list"),
        (lambda m: m["model"].update(surprise=3), r"unknown model fields \['surprise'\]"),
        (lambda m: m.update(target=None), "target is not a string"),
        (lambda m: m.update(expert_policy=1), "expert_policy is not a string"),
        (lambda m: m.update(kernels=[]), "kernels is empty"),
        (lambda m: m.update(kernels=3), "kernels is not a list"),
        (lambda m: m["kernels"][0].update(file="weights.bin"), "is not listed"),
        (lambda m: m["kernels"][0].update(cpu_features=None), "cpu_features is not a list"),
        (lambda m: m.update(files=[]), "files is not a map"),
        (lambda m: m["files"].pop("experts.bin"), r"lists no experts\.bin"),
        (lambda m: m["files"]["experts.bin"].update(bytes=-1), r"experts\.bin\.bytes is -1"),
        (lambda m: m["files"]["experts.bin"].update(bytes=1e3), "expected an integer"),
        (lambda m: m["files"].update(more={"bytes": 0, "blake2b": ""}), "more: No such file"),
    ],
)
def test_bad_manifests(path: Path, change: Callable[[Any], None], message: str) -> None:
    edit_manifest(path, change)
    with pytest.raises(EmberdError, match=message) as caught:
        Artifact.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".hidden", "", "a\0b"])
def test_file_names_are_plain(path: Path, name: str) -> None:
    entry = {"bytes": 0, "blake2b": ""}
    edit_manifest(path, lambda m: m["files"].update({name: entry}))
    with pytest.raises(EmberdError, match="not a plain file name"):
        Artifact.open(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "nonsense", "[" * 100_000, "\ud800"])
def test_manifests_that_are_not_json_maps(path: Path, text: str) -> None:
    (path / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(EmberdError):
        Artifact.open(path)


@pytest.mark.parametrize("name", ["weights.bin", "experts.bin", "program.msgpack"])
@pytest.mark.parametrize("damage", ["shorter", "longer", "missing", "folder"])
def test_files_of_the_wrong_size(path: Path, name: str, damage: str) -> None:
    file = path / name
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(data[:-1] if damage == "shorter" else data + b"x")
    with pytest.raises(EmberdError, match=name.replace(".", r"\.")):
        Artifact.open(path)


@pytest.mark.parametrize("name", ["weights.bin", "experts.bin"])
def test_damaged_weights_are_found_when_asked(path: Path, name: str) -> None:
    data = bytearray((path / name).read_bytes())
    data[500] ^= 1
    (path / name).write_bytes(data)
    artifact = Artifact.open(path)
    with pytest.raises(EmberdError, match=f"{name} is damaged"):
        artifact.verify_weights()


def test_weights_are_checked_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = []

    def drop(descriptor: int, offset: int, size: int, advice: int) -> None:
        assert (offset, size, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0  # nothing is read before
        dropped.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "posix_fadvise", drop)
    Artifact.open(path).verify_weights()
    assert dropped == ["weights.bin", "experts.bin"]


@pytest.mark.parametrize("what", ["missing", "file", "empty folder"])
def test_not_an_artifact(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.write_text("")
    elif what == "empty folder":
        path.mkdir()
    reason = "does not exist" if what == "missing" else r"is not an artifact: manifest\.json"
    with pytest.raises(EmberdError, match=reason):
        Artifact.open(path)


@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_gives_one_kind_of_error(path: Path, data: st.DataObject) -> None:
    """Any damage to any small file is refused; in the manifest it may also go unnoticed, where it
    changes only what it says about the model."""
    name = data.draw(
        st.sampled_from(["manifest.json", "program.msgpack", "kernels-plain.so", "tokenizer.json"])
    )
    good = (path / name).read_bytes()
    bad = bytearray(good)
    if data.draw(st.booleans(), label="truncate"):
        del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    else:
        at = data.draw(st.integers(0, len(bad) - 1))
        bad[at] ^= 1 << data.draw(st.integers(0, 7))
    (path / name).write_bytes(bad)
    try:
        artifact = Artifact.open(path)
    except EmberdError as error:
        assert "\n" not in str(error)
    else:
        assert name == "manifest.json"
        assert artifact.read("tokenizer.json") == b'{"model": 1}'
    finally:
        (path / name).write_bytes(good)


def test_a_manifest_beyond_the_limit_is_refused(path: Path) -> None:
    with (path / "manifest.json").open("ab") as file:
        file.truncate(17 << 20)
    with pytest.raises(EmberdError):
        Artifact.open(path)


def test_moving_an_artifact_keeps_it_valid(path: Path, tmp_path: Path) -> None:
    digest = Artifact.open(path).digest
    shutil.move(path, tmp_path / "elsewhere")
    assert Artifact.open(tmp_path / "elsewhere").digest == digest
