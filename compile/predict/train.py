"""Trains the lstm predictor on recorded traces, with torch (the extra `train`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from emberd.compile.files import write_whole
from emberd.compile.predict.network import Weights, check, to_onnx
from emberd.compile.predict.predictor import AHEAD, Experts
from emberd.compile.residency.trace import CommandTrace, Trace, TraceHeader
from emberd.daemon.errors import EmberdError
from emberd.daemon.expert_predictor import WINDOW
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import trange

_SEED = 20260101
_WINDOWS = 64  # in a step
_EMBEDDING = 32
_STATE = 96
_LEARNING_RATE = 4e-3  # falls to 0 in a straight line
_WEIGHT_DECAY = 0.01


class Network(nn.Module):  # type: ignore[misc]
    """The network of `network.py`, over whole windows."""

    def __init__(self, header: TraceHeader) -> None:
        super().__init__()
        experts = header.layers * header.experts
        self.embedding = nn.Parameter(
            torch.randn(experts, _EMBEDDING) / (header.layers * header.top_k) ** 0.5
        )
        self.lstm = nn.LSTM(_EMBEDDING, _STATE, batch_first=True)
        self.ahead = nn.Linear(_STATE, AHEAD * _EMBEDDING)
        self.score_bias = nn.Parameter(torch.zeros(AHEAD, experts))
        self._layers, self._experts = header.layers, header.experts

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [windows, tokens, layers, top_k] -> logits f32 [windows, tokens, AHEAD, layers,
        experts] after each of the tokens."""
        rows = ids + self._experts * torch.arange(self._layers)[:, None]
        state, _ = self.lstm(nn.functional.embedding(rows.flatten(2), self.embedding).sum(2))
        ahead = self.ahead(state).unflatten(-1, (AHEAD, _EMBEDDING))
        logits = ahead @ self.embedding.T + self.score_bias
        return logits.unflatten(-1, (self._layers, self._experts))

    def weights(self) -> Weights:
        """For numpy and ONNX."""
        lstm = self.lstm

        def array(value: Tensor) -> NDArray[np.float32]:
            found: NDArray[np.float32] = value.detach().numpy()
            return found.copy()

        return Weights(
            embedding=array(self.embedding),
            input_weight=array(lstm.weight_ih_l0),
            state_weight=array(lstm.weight_hh_l0),
            gate_bias=array(lstm.bias_ih_l0 + lstm.bias_hh_l0),
            ahead_weight=array(self.ahead.weight),
            ahead_bias=array(self.ahead.bias),
            score_bias=array(self.score_bias),
        )


def train(header: TraceHeader, commands: Sequence[CommandTrace], steps: int) -> Network:
    """A network that has learnt what the tokens of these commands, of two tokens or more,
    chose; the same every time on a machine.

    Minimises the cross entropy of each layer's scores, taken as a softmax over its experts, to the
    experts chosen. Every window begins at a random token of a random command, with no state.
    """
    torch.manual_seed(_SEED)
    torch.set_num_threads(1)  # the matrices are so small that threads would wait for each other
    draw = np.random.default_rng(_SEED)
    network = Network(header)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, steps)
    ids = [command.ids for command in commands]
    with trange(steps, desc="training", unit=" steps", disable=not sys.stderr.isatty()) as bar:
        for _ in bar:
            windows, lengths = _draw(ids, draw)
            found = _loss(network(windows[:, :WINDOW]), windows, lengths)
            optimiser.zero_grad()
            found.backward()
            optimiser.step()
            schedule.step()
            bar.set_postfix(loss=f"{found.item():.3f}", refresh=False)
    return network


def train_on(trace: Path, output: Path, steps: int) -> None:
    """Trains on a recorded trace and writes the network as ONNX.

    Raises EmberdError where the trace has nothing to learn, and when onnxruntime does otherwise
    than the network's reference with what was learnt.
    """
    recorded = Trace(trace)
    commands = [command for command in recorded if len(command.ids) > 1]
    if not commands:
        raise EmberdError(f"{trace}: no command of two tokens or more to learn from")
    weights = train(recorded.header, commands, steps).weights()
    network = to_onnx(weights, recorded.header)
    check(network, weights, commands[0].ids)
    write_whole(output, lambda file: file.write(network.SerializeToString()))


def _draw(commands: Sequence[Experts], draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """ids int64 [_WINDOWS, WINDOW + AHEAD, layers, top_k] and how many tokens of each window there
    are before its command ends."""
    windows = np.zeros((_WINDOWS, WINDOW + AHEAD, *commands[0].shape[1:]), np.int64)
    lengths = np.zeros(_WINDOWS, np.int64)
    for index in range(_WINDOWS):
        ids = commands[int(draw.integers(len(commands)))]
        start = int(draw.integers(len(ids) - 1))
        part = ids[start : start + WINDOW + AHEAD]
        windows[index, : len(part)] = part
        lengths[index] = len(part)
    return torch.from_numpy(windows), torch.from_numpy(lengths)


def _loss(logits: Tensor, windows: Tensor, lengths: Tensor) -> Tensor:
    """Mean over the experts that were chosen 1 to AHEAD tokens after a token of a window."""
    likelihood = logits.log_softmax(-1)
    total, count = torch.zeros(()), 0
    for ahead in range(1, AHEAD + 1):
        chosen = windows[:, ahead : ahead + WINDOW]
        there = torch.arange(ahead, ahead + WINDOW) < lengths[:, None]
        found = likelihood[:, :, ahead - 1].gather(-1, chosen)[there]
        total, count = total - found.sum(), count + found.numel()
    return total / count
