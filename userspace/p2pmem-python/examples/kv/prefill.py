# SPDX-License-Identifier: MIT OR Apache-2.0
"""The node that computes prompts, and one node that does everything, for comparison.

The node that prefills may write only to blocks that the other node has granted, so a slow decoder holds it back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .cache import HostMemory, Pool, SequenceCache, page_offset
from .control import Channel, Message, PeerError
from .engines import Engine, Piece
from .model import Model, Shape, make_prompt


@dataclass(frozen=True)
class Work:
    """What to compute."""

    #: The number of prompts.
    requests: int
    #: Tokens of each prompt, at least 2: the last one is left to the decoder.
    prompt: int
    #: Tokens that continue each prompt.
    new: int

    def __post_init__(self) -> None:
        if self.requests < 1 or self.prompt < 2 or self.new < 1:
            raise ValueError(f"{self}: at least one request, two tokens of the prompt, and one new token")

    def prompt_blocks(self, shape: Shape) -> int:
        """Blocks of a prompt without its last token."""
        return shape.blocks(self.prompt - 1)

    def all_blocks(self, shape: Shape) -> int:
        """Blocks of a prompt and its continuation. The last new token is in no block."""
        return shape.blocks(self.prompt - 1 + self.new)


@dataclass
class Report:
    """What was done. Times are in seconds, by the clock of the node that prefills."""

    tokens: list[list[int]]
    #: For each request, from the beginning of its prefill until its first token was there.
    first_token: list[float] = field(default_factory=list)
    #: What the first node did meanwhile: computing, moving, and waiting for blocks, of all requests together.
    computing: float = 0
    moving: float = 0
    waiting: float = 0
    #: How often there was no block to write to.
    waits: int = 0
    #: Bytes of the cache that the engine moved, and that the processors of both nodes copied.
    moved: int = 0
    copied: int = 0
    #: Bytes that the second node moved to its drive, and back.
    stored: int = 0
    loaded: int = 0


class Prefiller:
    """Computes the prompts, and writes their blocks to the other node."""

    def __init__(
        self, channel: Channel, engine: Engine, model: Model, pool: Pool, remote: Message, work: Work, chunk: int, *, verify: bool
    ) -> None:
        """`remote` is the other node's welcome, `chunk` the number of blocks of a transfer."""
        self._channel, self._engine, self._model, self._pool, self._work = channel, engine, model, pool, work
        self._address, self._blocks = int(remote["address"]), int(remote["blocks"])
        self._chunk, self._verify = chunk, verify
        self._granted: list[deque[int]] = [deque() for _ in range(work.requests)]
        self._begun: list[float] = []
        self._report = Report([[] for _ in range(work.requests)])

    def run(self) -> Report:
        report = self._report
        for request in range(self._work.requests):
            self._prefill(request)
        while any(len(tokens) < self._work.new for tokens in report.tokens):
            self._take(self._channel.receive("token", "grant"))
        finished = self._channel.receive("finished")
        report.copied += finished["copied"]
        report.stored, report.loaded = finished["stored"], finished["loaded"]
        return report

    def _prefill(self, request: int) -> None:
        prompt = make_prompt(request, self._work.prompt)
        table = self._pool.take(self._work.prompt_blocks(self._pool.shape))
        cache = SequenceCache(self._pool, table)
        self._begun.append(time.monotonic())
        for first in range(0, len(table), self._chunk):
            part = table[first : first + self._chunk]
            begun = time.monotonic()
            for index in range(first, first + len(part)):
                self._model.prefill(prompt, index * self._pool.shape.block, cache)
            self._report.computing += time.monotonic() - begun
            self._write(request, part)
        self._channel.send("prefilled", request=request, last=prompt[-1])
        if self._verify:
            whole = (len(prompt) - 1) // self._pool.shape.block
            self._channel.send("digest", request=request, digest=self._pool.digest(table[:whole]))
        self._pool.give_back(table)

    def _write(self, request: int, blocks: Sequence[int]) -> None:
        """Writes blocks as blocks are granted."""
        while blocks:
            granted = self._wait_for_blocks(request)
            begun = time.monotonic()
            targets = [granted.popleft() for _ in range(min(len(granted), len(blocks)))]
            sources, blocks = blocks[: len(targets)], blocks[len(targets) :]
            self._report.copied += self._pool.to_window(sources)
            pieces = self._pieces(sources, targets)
            self._engine.write(pieces)
            self._report.moved += sum(size for _, _, size in pieces)
            self._channel.send("written", request=request, blocks=targets)
            self._report.moving += time.monotonic() - begun

    def _wait_for_blocks(self, request: int) -> deque[int]:
        """Returns the blocks that are granted, at least one."""
        while (message := self._channel.poll("token", "grant")) is not None:
            self._take(message)
        granted = self._granted[request]
        if not granted:
            begun = time.monotonic()
            self._report.waits += 1
            self._channel.send("waiting")
            while not granted:
                self._take(self._channel.receive("token", "grant"))
            self._report.waiting += time.monotonic() - begun
        return granted

    def _pieces(self, sources: Sequence[int], targets: Sequence[int]) -> list[Piece]:
        """Returns what to write. Pages that follow each other on both nodes are one piece."""
        pieces: list[Piece] = []
        size = self._pool.shape.page_bytes
        for layer in range(self._pool.shape.layers):
            for source, target in zip(sources, targets):
                here = self._pool.window.address + self._pool.offset(layer, source)
                there = self._address + page_offset(self._pool.shape, self._blocks, layer, target)
                before = pieces[-1] if pieces else (0, 0, 0)
                if (before[0] + before[2], before[1] + before[2]) == (here, there):
                    pieces[-1] = (before[0], before[1], before[2] + size)
                else:
                    pieces.append((here, there, size))
        return pieces

    def _take(self, message: Message) -> None:
        """Takes over granted blocks, or a token."""
        request = message["request"]
        if not 0 <= request < self._work.requests:
            raise PeerError(f"the other node names request {request} of {self._work.requests}")
        if message.kind == "grant":
            strange = [block for block in message["blocks"] if not 0 <= block < self._blocks]
            if strange:
                raise PeerError(f"the other node grants the blocks {strange}, and has {self._blocks}")
            self._granted[request].extend(message["blocks"])
            return
        tokens = self._report.tokens[request]
        if request >= len(self._begun) or len(tokens) >= self._work.new:
            raise PeerError(f"the other node sends a token of request {request} that nobody waits for")
        if not tokens:
            self._report.first_token.append(message.arrived - self._begun[request])
        tokens.append(message["token"])


def compute_alone(model: Model, work: Work, pool: Pool | None = None) -> Report:
    """Computes everything on one node, with the cache in a pool; without one, in host memory."""
    blocks = work.all_blocks(model.shape)
    if pool is None:
        pool = Pool(model.shape, HostMemory(Pool.bytes(model.shape, blocks)), blocks)
    report = Report([])
    for request in range(work.requests):
        prompt = make_prompt(request, work.prompt)
        table = pool.take(blocks)
        cache = SequenceCache(pool, table)
        begun = time.monotonic()
        for first in range(0, len(prompt) - 1, model.shape.block):
            model.prefill(prompt, first, cache)
        report.computing += time.monotonic() - begun
        tokens = [model.decode(prompt[-1], len(prompt) - 1, cache)]
        report.first_token.append(time.monotonic() - begun)
        while len(tokens) < work.new:
            tokens.append(model.decode(tokens[-1], len(prompt) - 1 + len(tokens), cache))
        report.tokens.append(tokens)
        pool.give_back(table)
    return report
