"""Train the demo model: ``python firmware_assets/demo/train.py --out firmware_assets/demo/model``.

Everything is seeded and counted in steps, so a run can be paused, or stopped and resumed from the
checkpoint in ``--work``, without changing its schedule.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from grammar import Dialogue, Message, expand, make_dialogue
from intents import CLASSES
from model import fake_quantised, new_model, use_fast_training_forms
from tokenizer import SPECIAL_TOKENS, THINK_TOKENS, train_tokenizer
from torch import Tensor
from torch.func import functional_call
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5MoeForCausalLM

BATCHES_PER_POOL = 16  # batches that are generated and sorted by length together
SMALL_TALK = {
    "en": (
        "[hello|hi|hey|good morning][ there|]",
        "[who|what] are you?",
        "[thanks|thank you]",
        "[what can you do|help]",
    ),
    "zh": ("[你好|您好|早上好|嗨]", "你是谁", "[谢谢|多谢]", "[你会什么|你能做什么|帮助]"),
}
SMALL_TALK_ANSWERS = {
    "en": 'I help with navigation, climate, media and machine faults.\n{"action":"none"}',
    "zh": '我可以帮您导航、调空调、放音乐和诊断机器。\n{"action":"none"}',
}


@dataclass(frozen=True)
class Example:
    """One rendered dialogue: token ids, a supervision flag a token, and the class index."""

    ids: list[int]
    supervised: list[bool]
    class_index: int


def small_talk(rng: random.Random) -> list[Message]:
    """A greeting and its answer, so that the model has something to say outside its classes."""
    language = rng.choice(("en", "zh"))
    text = expand(rng.choice(SMALL_TALK[language]), rng)
    answer = SMALL_TALK_ANSWERS[language]
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def render(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], class_index: int, thinking: bool
) -> Example:
    """Tokens as the daemon renders the last turn; every assistant turn is supervised."""
    opening = "<|im_start|>assistant\n"
    prompt = str(
        tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
    )
    ids: list[int] = []
    supervised: list[bool] = []

    def append(text: str, flag: bool) -> None:
        piece = tokenizer(text, add_special_tokens=False).input_ids
        ids.extend(piece)
        supervised.extend([flag] * len(piece))

    head, *answered = prompt.split(opening)
    append(head, False)
    for part in answered[:-1]:
        answer, rest = part.split("<|im_end|>", 1)
        append(opening, False)
        append(answer + "<|im_end|>", True)
        append(rest, False)
    append(opening + answered[-1], False)
    closing = "\n</think>\n\n" if thinking else ""
    append(closing + messages[-1]["content"] + "<|im_end|>", True)
    return Example(ids, supervised, class_index)


class ExampleStream:
    """Endless batches of training examples, a function of the seed and the pool number alone."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, batch: int) -> None:
        self.tokenizer, self.seed, self.batch = tokenizer, seed, batch

    def _example(self, rng: random.Random) -> Example:
        thinking = rng.random() < 0.03
        if rng.random() < 0.03:
            return render(self.tokenizer, small_talk(rng), -1, thinking)
        dialogue: Dialogue = make_dialogue(rng, "train")
        index = CLASSES.index(dialogue.command_class)
        return render(self.tokenizer, dialogue.messages, index, thinking)

    def pool(self, number: int) -> list[list[Example]]:
        """``BATCHES_PER_POOL`` batches of similar lengths, in random order."""
        rng = random.Random(f"{self.seed}/{number}")
        examples = [self._example(rng) for _ in range(self.batch * BATCHES_PER_POOL)]
        examples.sort(key=lambda example: len(example.ids))
        batches = [examples[i : i + self.batch] for i in range(0, len(examples), self.batch)]
        rng.shuffle(batches)
        return batches


def collate(examples: list[Example], pad: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids [B, T] right-padded, supervised [B, T], valid [B, T] and class index [B]."""
    length = max(len(e.ids) for e in examples)
    ids = torch.full((len(examples), length), pad)
    supervised = torch.zeros(len(examples), length, dtype=torch.bool)
    valid = torch.zeros(len(examples), length, dtype=torch.bool)
    for row, e in enumerate(examples):
        ids[row, : len(e.ids)] = torch.tensor(e.ids)
        supervised[row, : len(e.ids)] = torch.tensor(e.supervised)
        valid[row, : len(e.ids)] = True
    return ids, supervised, valid, torch.tensor([e.class_index for e in examples])


def routing_loss(router_logits: tuple[Tensor, ...], valid: Tensor, classes: Tensor) -> Tensor:
    """Minus the mutual information of expert and command class, averaged over layers, in nats.

    ``router_logits`` are [B*T, E] a layer. The entropy of the mean keeps the experts balanced, the
    entropy a class makes each class settle on experts of its own.
    """
    flat_class = classes[:, None].expand_as(valid).reshape(-1)
    chosen = valid.reshape(-1) & (flat_class >= 0)
    members = torch.nn.functional.one_hot(flat_class[chosen], len(CLASSES)).float()  # [N, C]
    members = members[:, members.sum(0) > 0]
    total = torch.zeros(())
    for logits in router_logits:
        probs = logits[chosen].softmax(-1)
        by_class = (members / members.sum(0)).T @ probs  # [C, E]
        entropy_by_class = -(by_class * by_class.clamp_min(1e-9).log()).sum(-1).mean()
        mean = by_class.mean(0)
        total = total + entropy_by_class + (mean * mean.clamp_min(1e-9).log()).sum()
    return total / len(router_logits)


def balance_loss(router_logits: tuple[Tensor, ...], valid: Tensor, top_k: int) -> Tensor:
    """The Switch load-balancing loss, averaged over layers; 1 when perfectly even."""
    total = torch.zeros(())
    for logits in router_logits:
        probs = logits[valid.reshape(-1)].softmax(-1)
        picked = torch.zeros_like(probs).scatter_(1, probs.topk(top_k, dim=-1).indices, 1.0)
        total = total + (picked.mean(0) / top_k * probs.mean(0)).sum() * probs.shape[-1]
    return total / len(router_logits)


def step_loss(
    model: Qwen3_5MoeForCausalLM, batch: tuple[Tensor, Tensor, Tensor, Tensor], quantised: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy on supervised tokens (nats), routing loss and balance loss of a batch."""
    ids, supervised, valid, classes = batch
    weights = fake_quantised(model) if quantised else dict(model.named_parameters())
    backbone = {n.removeprefix("model."): w for n, w in weights.items() if n.startswith("model.")}
    arguments = {"input_ids": ids, "use_cache": False, "output_router_logits": True}
    outputs = functional_call(model.model, backbone, (), arguments)
    targets = supervised[:, 1:]
    hidden = outputs.last_hidden_state[:, :-1][targets]  # [N, hidden]
    logits = torch.nn.functional.linear(hidden, weights["model.embed_tokens.weight"])
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][targets])
    routers = outputs.router_logits
    top_k = model.config.num_experts_per_tok
    return loss, routing_loss(routers, valid, classes), balance_loss(routers, valid, top_k)


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def export(model: Qwen3_5MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the Hugging Face checkpoint folder in bf16."""
    out.mkdir(parents=True, exist_ok=True)
    ids = {t: tokenizer.convert_tokens_to_ids(t) for t in (*SPECIAL_TOKENS, *THINK_TOKENS)}
    half = Qwen3_5MoeForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[ids["<|im_end|>"], ids["<|endoftext|>"]],
        pad_token_id=ids["<|endoftext|>"],
    )
    half.to(torch.bfloat16).save_pretrained(out, save_original_format=False)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    settings_path = out / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text(encoding="utf-8"))
    for machine_local in ("backend", "is_local", "local_files_only"):
        settings.pop(machine_local, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["chat_template"] = tokenizer.chat_template
    settings_path.write_text(json.dumps(settings, ensure_ascii=False, indent=2) + "\n", "utf-8")


def train(arguments: argparse.Namespace) -> None:
    """Run or resume the training."""
    torch.set_num_threads(arguments.threads)
    use_fast_training_forms()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    kept = work / "tokenizer"
    if kept.exists():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(kept)
    else:
        tokenizer = train_tokenizer(arguments.seed)
        tokenizer.save_pretrained(kept)
    model = new_model(arguments.seed).train()
    decayed = [w for w in model.parameters() if w.ndim >= 2]
    plain = [w for w in model.parameters() if w.ndim < 2]
    optimiser = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    checkpoint, first = work / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        first = state["step"]
    stream = ExampleStream(tokenizer, arguments.seed, arguments.batch)
    pool = stream.pool(first // BATCHES_PER_POOL)
    started, tokens = time.monotonic(), 0
    for step in range(first, arguments.steps):
        if step % BATCHES_PER_POOL == 0:
            pool = stream.pool(step // BATCHES_PER_POOL)
        batch = collate(pool[step % BATCHES_PER_POOL], int(tokenizer.pad_token_id))
        quantised = step >= arguments.steps * arguments.quantise_from
        loss, routing, balance = step_loss(model, batch, quantised)
        (loss + arguments.routing * routing + arguments.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, arguments.steps, arguments.peak)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        tokens += int(batch[2].sum())
        if step % 25 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {step} loss {loss.item():.4f} class information {-routing.item():.3f} "
                f"balance {balance.item():.3f} tokens/s {tokens / seconds:.0f} "
                f"seconds {seconds:.0f}",
                flush=True,
            )
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            state = {
                "model": model.state_dict(),
                "optimiser": optimiser.state_dict(),
                "step": step + 1,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
    export(model, tokenizer, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5100)
    parser.add_argument("--batch", type=int, default=32, help="dialogues a step")
    parser.add_argument("--peak", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--routing", type=float, default=0.05, help="weight of the routing loss")
    parser.add_argument("--balance", type=float, default=0.01, help="weight of the balance loss")
    parser.add_argument("--quantise-from", type=float, default=0.7, help="fraction of the steps")
    parser.add_argument("--save-every", type=int, default=200, help="steps")
    parser.add_argument("--threads", type=int, default=2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
