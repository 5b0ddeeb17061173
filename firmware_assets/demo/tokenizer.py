"""The demo's tokenizer: byte-level BPE in the Qwen3.5 layout, trained on the grammar's own text."""

from __future__ import annotations

import random
from pathlib import Path

from grammar import make_dialogue
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TOKENS = ("<think>", "</think>")
TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(seed: int, dialogues: int) -> list[str]:
    """The role words and the message texts of ``dialogues`` random training dialogues."""
    rng = random.Random(seed)
    roles = ["system\n", "user\n", "assistant\n"] * 200
    made = (make_dialogue(rng, "train") for _ in range(dialogues))
    return roles + [message["content"] for dialogue in made for message in dialogue.messages]


def train_tokenizer(seed: int, dialogues: int = 20000) -> PreTrainedTokenizerFast:
    """Train ``VOCAB_SIZE`` tokens: bytes, merges, then special and thinking tokens at the end."""
    added = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    added += [AddedToken(t, special=False, normalized=False) for t in THINK_TOKENS]
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = Sequence(
        [
            Split(Regex(PATTERN), "isolated"),
            ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = ByteLevelProcessor(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, dialogues), trainer)
    tokenizer.add_tokens(added)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE_PATH.read_text(encoding="utf-8"),
    )
