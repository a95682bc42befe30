# SPDX-License-Identifier: MIT OR Apache-2.0
"""A small transformer with fixed weights, which computes in float32. Its keys and values are in a cache that the caller keeps.

The model is not trained. What it continues is a function of its weights and of every token before, so one wrong byte in the cache
shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

#: Tokens that the model knows.
VOCABULARY = 512
#: Numbers for which a head compares a query with a key.
HEAD = 32
#: How much more the tokens before count than the token itself, and how much a head prefers the tokens that match best. With these
#: values, the model does not repeat itself, and a change of any page changes what it says.
GAIN, SHARPNESS = np.float32(4), np.float32(5)
#: The seeds of the weights and of the prompts.
WEIGHTS_SEED, PROMPT_SEED = 1, 2


@dataclass(frozen=True)
class Shape:
    """What both nodes must agree on: the dimensions of the model, and those of a block of its cache."""

    layers: int = 4
    #: Numbers that represent a token.
    width: int = 128
    #: Tokens of a block.
    block: int = 16

    def __post_init__(self) -> None:
        if self.layers < 1 or self.block < 1 or self.width < HEAD or self.width % HEAD:
            raise ValueError(f"{self}: at least one layer and one token, and a width that is a multiple of {HEAD}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys of a block's tokens in one layer, and then their values."""
        return 2 * self.block * self.width * np.dtype(np.float32).itemsize

    def blocks(self, tokens: int) -> int:
        """The number of blocks for so many tokens."""
        return -(-tokens // self.block)


class Cache(Protocol):
    """The keys and values of the tokens of one sequence."""

    def append(self, layer: int, position: int, keys: Array, values: Array) -> None:
        """Stores the keys and values of tokens from a position on, a row for each token."""

    def load(self, layer: int, tokens: int) -> tuple[Array, Array]:
        """Returns the keys and values of the first tokens, a row for each token."""


class Model:
    """The weights."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        random = np.random.default_rng(WEIGHTS_SEED)
        width = shape.width

        def weights(rows: int, columns: int) -> Array:
            drawn: Array = (random.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
            return drawn

        self._embedding = weights(VOCABULARY, width) * np.float32(np.sqrt(VOCABULARY))
        self._layers: list[tuple[Array, ...]] = [
            (weights(width, 3 * width), weights(width, width), weights(width, 4 * width), weights(4 * width, width))
            for _ in range(shape.layers)
        ]
        self._output = weights(width, VOCABULARY)

    def forward(self, tokens: Sequence[int], position: int, cache: Cache) -> Array:
        """Computes tokens from a position on, all of whose predecessors are in the cache, and appends them to the cache. Returns the
        logits of the token after the last one.
        """
        count, heads = len(tokens), self.shape.width // HEAD
        end = position + count
        hidden = self._embedding[np.asarray(tokens)] + self._positions(position, count)
        # A token sees itself and those before.
        hide = np.arange(end) > np.arange(position, end)[:, None]
        for layer, (attention, mix, up, down) in enumerate(self._layers):
            queries, keys, values = np.split(normalize(hidden) @ attention, 3, axis=1)
            cache.append(layer, position, keys, values)
            keys, values = cache.load(layer, end)
            q, k, v = (part.reshape(-1, heads, HEAD).swapaxes(0, 1) for part in (queries, keys, values))
            scores = SHARPNESS * (q @ k.swapaxes(1, 2)) / np.float32(np.sqrt(HEAD))
            seen = softmax(np.where(hide, np.float32(-np.inf), scores)) @ v
            hidden = hidden + GAIN * normalize(seen.swapaxes(0, 1).reshape(count, -1)) @ mix
            hidden = hidden + np.maximum(normalize(hidden) @ up, 0) @ down
        logits: Array = normalize(hidden[-1:])[0] @ self._output
        return logits

    def _positions(self, position: int, count: int) -> Array:
        half = self.shape.width // 2
        steps = np.arange(position, position + count)[:, None] / 10000 ** (np.arange(half) / half)
        rows: Array = np.concatenate([np.sin(steps), np.cos(steps)], axis=1).astype(np.float32)
        return rows

    def prefill(self, prompt: Sequence[int], first: int, cache: Cache) -> None:
        """Computes the block of a prompt that begins at a token, without the prompt's last token: decoding begins with that one.

        Blocks are always computed one by one: other sizes of a product may round otherwise, and the nodes compare their tokens.
        """
        self.forward(prompt[first : min(first + self.shape.block, len(prompt) - 1)], first, cache)

    def decode(self, token: int, position: int, cache: Cache) -> int:
        """Computes one token, and returns the most likely one after it."""
        return int(np.argmax(self.forward([token], position, cache)))


def normalize(rows: Array) -> Array:
    """Scales each row to a mean square of 1."""
    scaled: Array = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + np.float32(1e-6))
    return scaled


def softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def make_prompt(request: int, tokens: int) -> list[int]:
    """Returns the prompt of a request: the same tokens on every machine."""
    found: Any = np.random.default_rng([PROMPT_SEED, request]).integers(VOCABULARY, size=tokens)
    return [int(token) for token in found]
