"""Configuration files: every mistake is one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from emberd.daemon import config
from emberd.daemon.cli import main
from emberd.daemon.errors import EmberdError


def test_settings_of_the_file_and_of_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text("port: 9000\nslots: 4\ndrain_seconds: 5\n")
    loaded = config.load(path, {"port": 9001, "host": None})
    assert (loaded.port, loaded.slots, loaded.drain_seconds) == (9001, 4, 5.0)
    assert loaded.host == "127.0.0.1"


@pytest.mark.parametrize("text", ["# port: 9000\n", "{}", "---\n"])
def test_a_file_may_leave_all_settings_at_their_defaults(tmp_path: Path, text: str) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text(text)
    assert config.load(path, {}) == config.Config()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot: 1", "unknown setting 'prot'"),
        ("port: high", "port: expected int"),
        ("port: 1.5", "port: expected int"),
        ("port: true", "port: expected int"),
        ("port: 70000", "expected 0 to 65535"),
        ("drain_seconds: .inf", "expected 0 to 86400"),
        ("keep_alive: 5 minutes", "expected seconds, or a number with s, m or h such as '5m'"),
        ('keep_alive: ""', "expected seconds, or a number with s, m or h"),
        ("keep_alive: [5]", "keep_alive: expected float"),
        ("keep_alive: 1e99h", "keep_alive: expected -1e"),
        ("keep_alive: .nan", "keep_alive: expected -1e"),
        (
            "expert_budget: 6 GBit",
            "expert_budget: '6 GBit' is not a size such as 6G: expected a number",
        ),
        ('expert_budget: ""', "'' is not a size such as 6G"),
        ("expert_budget: 1e999G", "'1e999G' is not a size such as 6G"),
        (
            "expert_budget: -2",
            "expected the bytes of memory for experts, a size such as '6G', or -1",
        ),
        ("expert_budget: 1" + "0" * 400, "expert_budget: expected the bytes of memory"),
        ("expert_budget: 1" + "0" * 5000, "not YAML: "),
        ("max_body_bytes: 8 pages", "max_body_bytes: '8 pages' is not a size such as 6G"),
        ("max_body_bytes: 2G", "max_body_bytes: expected 1024 to "),
        ("host: 2026-99-99", "not YAML: "),
        ("reader_threads: 0", "reader_threads: expected 1 to 64"),
        ("stall_deadline: 1e9", "stall_deadline: expected 0 to 60000"),
        ("stall_deadline: soon", "stall_deadline: expected float, not 'soon'"),
        ("routing_margin: 1.5", "routing_margin: expected 0 to 1"),
        ("stall_deadline: -1", "stall_deadline: expected 0 to 60000"),
        ("stall_weight: 2", "stall_weight: expected 0 to 1"),
        ("expert_policy: 3", "expert_policy: expected str"),
        ("expert_policy: fifo", "expert_policy: unknown policy 'fifo'; the daemon has lru, "),
        ("expert_policy: belady", "expert_policy: only emberc simulate has the policy belady; "),
        ("host: 3", "host: expected str"),
        ('host: ""', "host: empty; write 0.0.0.0 to listen on every interface"),
        ('host: "\\0"', "host: expected printable characters"),
        ('api_key: "\\uD800"', "api_key: expected printable characters"),
        ("stall_deadline: 1" + "0" * 400, "stall_deadline: expected 0 to 60000"),
        ("[" * 20_000, "nested too deep"),
        ("slots: 0", "slots: expected 1 to 256"),
        ("", "empty; for the defaults write {}, or a comment"),
        (" \n\n", "empty; for the defaults write {}, or a comment"),
        ("- a", "expected settings"),
        ("a: [", "not YAML"),
        ("1: 2", "unknown setting 1"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text(text)
    with pytest.raises(EmberdError, match=reason):
        config.load(path, {})
    assert main(["serve", str(tmp_path), "--config", str(path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("emberd: error: ") and reason in errors[0]


def test_a_missing_file_or_artifact_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EmberdError, match="cannot be read"):
        config.load(tmp_path / "none.yaml", {})
    assert main(["serve", str(tmp_path / "nothing")]) == 2
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("nothing does not exist") == 2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1e3", 1000),
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("1.5h", 5400),
        ("0", 0),
        ("-1", -1),
        ("-1m", -60),
    ],
)
def test_how_long_an_idle_model_stays(tmp_path: Path, text: str, seconds: float) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text(f"keep_alive: {text}\n")
    assert config.load(path, {}).keep_alive == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("90000", 90_000), ("90K", 92_160), ("6G", 6 << 30), ("500KB", 500_000), ("-1", -1)],
)
def test_memory_for_experts(tmp_path: Path, text: str, size: int) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text(f"expert_budget: {text}\n")
    assert config.load(path, {}).expert_budget == size


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("8M", 8 << 20), ("2MB", 2_000_000)])
def test_the_largest_body(tmp_path: Path, text: str, size: int) -> None:
    path = tmp_path / "emberd.yaml"
    path.write_text(f"max_body_bytes: {text}\n")
    assert config.load(path, {}).max_body_bytes == size
