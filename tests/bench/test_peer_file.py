"""llama.cpp on the file that is written for it against onnxruntime on the converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import MODELS, TinyModel, write_checkpoint
from emberd.compile.build import build
from emberd.compile.convert import convert
from emberd.compile.converted import ConvertedModel
from emberd.compile.oracle import Oracle
from emberd.compile.traffic import decode_traffic
from emberd.daemon.artifact import Artifact
from emberd.daemon.program import Program, Section
from tokenizers import Tokenizer

from bench import tokenizer

pytestmark = pytest.mark.usefixtures("llama_cpp")

NAMES = {"nine_layers", "attention_first", "true_head_sizes", "value_heads_fourfold", "bfloat16"}
PEER_MODELS = [model for model in MODELS if model.name in NAMES]
QUANTISED = TinyModel("quantised", layers="DA", hidden=256, vocab=320, experts=4)


def _converted(model: TinyModel, folder: Path) -> ConvertedModel:
    write_checkpoint(folder / "checkpoint", model)
    convert(folder / "checkpoint", folder / "converted", name=model.name)
    return ConvertedModel.load(folder / "converted")


@pytest.fixture
def float_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's attention in float32: its cache and its flash attention round to float16."""
    import llama_cpp.llama_cpp as llama

    default = llama.llama_context_default_params

    def settings() -> Any:
        parameters = default()
        parameters.type_k = parameters.type_v = 0  # GGML_TYPE_F32
        parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return parameters

    monkeypatch.setattr(llama, "llama_context_default_params", settings)


@pytest.mark.parametrize("model", PEER_MODELS, ids=lambda model: model.name)
def test_llama_computes_the_same_model(
    model: TinyModel, tmp_path: Path, float_attention: None
) -> None:
    from bench.peer_file import write
    from bench.peer_side import PeerSide

    converted = _converted(model, tmp_path)
    write(converted, "f32", tmp_path / "peer.gguf")
    tokens = model.tokens().tolist()
    expected = Oracle(converted).session().step(tokens)
    side = PeerSide()
    side.start(str(tmp_path / "peer.gguf"), threads=1, context=128, streams=1, prompt=1)
    bound = 2e-4 * expected.std()
    side.clear()
    assert np.abs(side.logits(tokens) - expected).max() <= bound
    side.clear()
    steps = [side.logits(tokens[:50]), *(side.logits([token]) for token in tokens[50:])]
    assert np.abs(np.concatenate(steps) - expected).max() <= bound
    side.close()


def test_llama_cuts_texts_as_the_checkpoint_does(tmp_path: Path) -> None:
    import llama_cpp

    from bench.peer_file import write

    model = TinyModel("texts", layers="DA", hidden=64, vocab=3000)
    write_checkpoint(tmp_path / "checkpoint", model)
    tokenizer.write(tmp_path / "checkpoint", model.vocab)
    convert(tmp_path / "checkpoint", tmp_path / "converted")
    write(ConvertedModel.load(tmp_path / "converted"), "f32", tmp_path / "peer.gguf")
    side = llama_cpp.Llama(str(tmp_path / "peer.gguf"), vocab_only=True, verbose=False)
    text = "<|im_start|>user\nSet it to 23.5 \u00b0C, \u6253\u5f00\u7a7a\u8c03!<|im_end|>\n"
    expected = Tokenizer.from_file(str(tmp_path / "checkpoint" / "tokenizer.json")).encode(text)
    assert side.tokenize(text.encode(), add_bos=True, special=True) == expected.ids
    assert side.token_eos() == model.vocab - 3
    side.close()


@pytest.mark.parametrize("recipe", ["f32", "q8", "q4"])
def test_both_sides_read_the_same_bytes(recipe: str, tmp_path: Path) -> None:
    """Weights and chosen experts of a token; padding of the artifact aside."""
    from emberd.compile.quantize.recipes import RECIPES

    from bench.peer_file import peer_tensors

    converted = _converted(QUANTISED, tmp_path)
    build(tmp_path / "converted", tmp_path / "artifact", "host", recipe, chunk_sizes=(1,))
    artifact = Artifact.open(tmp_path / "artifact")
    program = Program.decode(artifact.program)
    ours = decode_traffic(program, QUANTISED.vocab, 0).by_section
    peers = 0.0
    for tensor in peer_tensors(converted, RECIPES[recipe]):
        share = 1.0
        if tensor.name == "token_embd.weight":
            share = 1 / QUANTISED.vocab
        elif "_exps" in tensor.name:
            share = QUANTISED.top_k / QUANTISED.experts
        peers += tensor.bytes * share
    assert ours[Section.WEIGHTS] + ours[Section.EXPERTS] == pytest.approx(peers, rel=0.02)
