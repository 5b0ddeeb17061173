"""Measure a demo checkpoint: exact JSON actions in f32 and as the device quantises it, and which
experts each command class uses.

``python firmware_assets/demo/evaluate.py --model firmware_assets/demo/model``
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from grammar import LANGUAGES, Action, Message, parse_action
from intents import CLASSES
from model import quantise_in_place
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM

HERE = Path(__file__).parent
SHOWN = 4  # experts listed for a class and layer


@dataclass(frozen=True)
class Case:
    """One held-out dialogue: the messages up to the user's last one, and the action wanted."""

    command_class: str
    language: str
    messages: list[Message]
    action: Action


def read_cases(path: Path) -> list[Case]:
    """The dialogues of a ``heldout.jsonl``."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Case(r["class"], r["language"], r["messages"], r["action"]) for r in rows]


def answers(
    model: Qwen3_5MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    cases: list[Case],
    batch: int = 50,
) -> list[str]:
    """Greedy answers, one a case; prompts of similar length run together, padded on the left."""
    tokenizer.padding_side = "left"
    prompts = [
        str(tokenizer.apply_chat_template(c.messages, tokenize=False, add_generation_prompt=True))
        for c in cases
    ]
    order = sorted(range(len(cases)), key=lambda i: len(prompts[i]))
    texts = [""] * len(cases)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
        width = inputs.input_ids.shape[1]
        with torch.inference_mode():
            produced = model.generate(
                input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=160
            )
        for index, ids in zip(chosen, produced[:, width:], strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            texts[index] = str(text)
    return texts


def accuracy_table(cases: list[Case], texts: list[str]) -> dict[str, tuple[int, int]]:
    """(right, total) for each class, each language and all cases together."""
    right: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for case, text in zip(cases, texts, strict=True):
        turns = "follow-up" if sum(m["role"] == "user" for m in case.messages) > 1 else "first turn"
        for key in (case.command_class, case.language, turns, "all"):
            total[key] += 1
            right[key] += parse_action(text) == case.action
    keys = (*CLASSES, *LANGUAGES, "first turn", "follow-up", "all")
    return {key: (right[key], total[key]) for key in keys}


def expert_shares(
    model: Qwen3_5MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, cases: list[Case]
) -> Tensor:
    """Share of routed slots [class, layer, expert] over the prompt and answer tokens of cases."""
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    counts = torch.zeros(len(CLASSES), layers, experts)
    for case in cases:
        answer = {"role": "assistant", "content": json.dumps(case.action, separators=(",", ":"))}
        text = tokenizer.apply_chat_template([*case.messages, answer], tokenize=False)
        ids = tokenizer(str(text), return_tensors="pt").input_ids
        with torch.inference_mode():
            outputs = model(input_ids=ids, output_router_logits=True, use_cache=False)
        for layer, logits in enumerate(outputs.router_logits):
            picked = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.flatten()
            counts[CLASSES.index(case.command_class), layer] += picked.bincount(minlength=experts)
    return counts / counts.sum(-1, keepdim=True)


def class_information(shares: Tensor) -> Tensor:
    """Mutual information of routed expert and class in bits [layer], classes equally likely."""
    mean = shares.mean(0, keepdim=True)
    ratio = torch.where(shares > 0, shares / mean, torch.ones_like(shares))
    return (shares * ratio.log2()).sum(-1).mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--heldout", type=Path, default=HERE / "heldout.jsonl")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--errors", action="store_true", help="print the wrong answers")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = read_cases(arguments.heldout)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = Qwen3_5MoeForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    results = {"f32": answers(model, tokenizer, cases)}
    shares = expert_shares(model, tokenizer, cases)
    quantise_in_place(model)
    results["q4"] = answers(model, tokenizer, cases)
    tables = {kind: accuracy_table(cases, texts) for kind, texts in results.items()}
    print("| exact actions | f32 | q4 |\n|---|---|---|")
    for key in tables["f32"]:
        scores = [tables[kind][key] for kind in ("f32", "q4")]
        print(
            f"| {key} | " + " | ".join(f"{r}/{n} ({100 * r / n:.1f} %)" for r, n in scores) + " |"
        )
    print("\n| layer | " + " | ".join(CLASSES) + " | bits |")
    print("|---" * (len(CLASSES) + 2) + "|")
    for layer, bits in enumerate(class_information(shares).tolist()):
        top = [shares[c, layer].topk(SHOWN) for c in range(len(CLASSES))]
        cells = [
            f"{' '.join(map(str, t.indices.tolist()))} ({100 * t.values.sum():.0f} %)" for t in top
        ]
        print(f"| {layer} | " + " | ".join(cells) + f" | {bits:.2f} |")
    if arguments.errors:
        for kind, texts in results.items():
            for case, text in zip(cases, texts, strict=True):
                if parse_action(text) != case.action:
                    print(kind, [m["content"] for m in case.messages], "->", text)


if __name__ == "__main__":
    main()
