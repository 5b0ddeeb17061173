"""The tokenizer of generated checkpoints: as large as asked for, and taken by the compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
from emberd.compile.tokenizer import compile_tokenizer
from tokenizers import Tokenizer

from bench import tokenizer

TEXT = "<|im_start|>user\nSet the temperature to 23.5 \u00b0C, \u6253\u5f00\u7a7a\u8c03<|im_end|>\n"


@pytest.mark.parametrize("vocab_size", [2048, 2049, 9000])
def test_every_id_is_a_token(tmp_path: Path, vocab_size: int) -> None:
    tokenizer.write(tmp_path, vocab_size)
    written = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert sorted(written.get_vocab().values()) == list(range(vocab_size))
    ids = written.encode(TEXT).ids
    assert {id for id in ids if id >= vocab_size - 5} == {vocab_size - 4, vocab_size - 3}
    assert written.decode(ids, skip_special_tokens=False) == TEXT
    compile_tokenizer((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))


def test_too_few_ids(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2047 ids"):
        tokenizer.write(tmp_path, 2047)
