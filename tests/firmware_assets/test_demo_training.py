"""The training code: the device's quantisation, exact fast forms, rendering as the daemon does."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import model as demo  # noqa: E402
import numpy as np  # noqa: E402
import tokenizer as demo_tokenizer  # noqa: E402
import train as demo_train  # noqa: E402
import transformers.models.qwen3_5_moe.modeling_qwen3_5_moe as reference  # noqa: E402


def q4_of_a_group(group: np.ndarray) -> np.ndarray:
    """One group of 32 weights, computed one value at a time."""
    peak = group[np.abs(group).argmax()]
    scale = np.float32(np.float16(peak / -8))
    inverse = np.float32(1) / scale if scale else np.float32(0)
    levels = [min(15, max(0, int(np.floor(w * inverse + np.float32(8.5))))) for w in group]
    return np.array([(q - 8) * scale for q in levels], np.float32)


def test_q4_is_what_the_device_computes() -> None:
    weights = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
    weights[2, :32] = 0
    wanted = np.stack(
        [np.concatenate([q4_of_a_group(g) for g in r.reshape(2, 32)]) for r in weights]
    )
    got = demo.quantise_q4(torch.from_numpy(weights)).numpy()
    np.testing.assert_array_equal(got, wanted)


def test_q8_error_is_at_most_half_a_step() -> None:
    weights = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    step = weights.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    error = (demo.quantise_q8(weights) - weights).unflatten(-1, (-1, 32)).abs()
    assert bool((error <= 0.5 * step * 1.02 + 127 * step * 2**-11).all())


def test_fake_quantisation_passes_gradients_through() -> None:
    model = demo.new_model(0)
    seen = demo.fake_quantised(model)
    name = "model.layers.0.mlp.experts.down_proj"
    weight = dict(model.named_parameters())[name]
    torch.testing.assert_close(seen[name], demo.quantise_q4(weight.detach()))
    seen[name].sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones_like(weight))


def test_fast_forms_give_the_reference_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(reference, name, getattr(reference, name))
    model = demo.new_model(0).eval()
    ids = torch.randint(0, 2000, (2, 75), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(input_ids=ids, use_cache=False).logits
        demo.use_fast_training_forms()
        got = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_examples_are_rendered_as_the_daemon_renders_them() -> None:
    tokenizer = demo_tokenizer.train_tokenizer(seed=0, dialogues=2000)
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "volume 20"},
        {"role": "assistant", "content": 'Ok.\n{"action":"a"}'},
        {"role": "user", "content": "louder"},
        {"role": "assistant", "content": 'Ok.\n{"action":"b"}'},
    ]
    for thinking, closing in ((False, ""), (True, "\n</think>\n\n")):
        example = demo_train.render(tokenizer, messages, class_index=2, thinking=thinking)
        prompt = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        assert (
            tokenizer.decode(example.ids) == f"{prompt}{closing}{messages[-1]['content']}<|im_end|>"
        )
        answers = [i for i, flag in zip(example.ids, example.supervised, strict=True) if flag]
        wanted = f"{messages[2]['content']}<|im_end|>{closing}{messages[4]['content']}<|im_end|>"
        assert tokenizer.decode(answers) == wanted


def test_routing_loss_is_minus_the_class_information() -> None:
    logits = torch.full((4, 8), -50.0)
    logits[torch.arange(4), torch.arange(4)] = 50.0
    valid, classes = torch.ones(4, 1, dtype=torch.bool), torch.arange(4)
    separate = demo_train.routing_loss((logits,), valid, classes)
    same = demo_train.routing_loss((torch.zeros(4, 8),), valid, classes)
    torch.testing.assert_close(separate, -torch.tensor(4.0).log())
    torch.testing.assert_close(same, torch.tensor(0.0))


def test_learning_rate_warms_up_and_ends_low() -> None:
    assert demo_train.learning_rate(0, 1000, 1.0) == pytest.approx(0.01)
    assert demo_train.learning_rate(100, 1000, 1.0) == pytest.approx(1.0)
    assert demo_train.learning_rate(1000, 1000, 1.0) == pytest.approx(0.02)
