# SPDX-License-Identifier: MIT OR Apache-2.0
"""The node that continues prompts. It grants its free blocks to the node that prefills, and takes over those that were written."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .cache import Drive, Pool, SequenceCache
from .control import Channel, Message, PeerError
from .model import VOCABULARY, Model
from .prefill import Work


class Request:
    """The state of a request on this node."""

    def __init__(self, due: int, extra: Sequence[int]) -> None:
        #: The number of blocks for the prompt that are still to be granted.
        self.due = due
        #: Blocks for the prompt in the order of its tokens, and for the tokens that continue it.
        self.granted: list[int] = []
        self.extra = list(extra)
        #: The number of granted blocks that are written.
        self.written = 0
        #: The prompt's last token, when all others are in the cache.
        self.last: int | None = None
        #: The hash of the prompt's whole blocks on the other node.
        self.digest: str | None = None
        #: Where the drive has the blocks of the prompt.
        self.place: int | None = None


class Decoder:
    """Decodes requests in their order.

    A request that is complete is decoded at once. With a drive, its blocks go to the drive, so that the other node can go on, and come
    back when all prompts are there. With `slow`, decoding begins only when the other node waits for blocks, or has nothing to do.
    """

    def __init__(
        self, channel: Channel, model: Model, pool: Pool, work: Work, *, drive: Drive | None = None, slow: bool = False, verify: bool = False
    ) -> None:
        self._channel, self._model, self._pool, self._work = channel, model, pool, work
        self._drive, self._slow, self._verify = drive, slow, verify
        self._prompt_blocks, self._all_blocks = work.prompt_blocks(model.shape), work.all_blocks(model.shape)
        if pool.blocks < self._all_blocks:
            raise ValueError(f"a request needs {self._all_blocks} blocks, and this node has {pool.blocks}: use --blocks")
        self._requests: list[Request] = []
        #: Requests whose prompt is complete.
        self._complete: deque[int] = deque()
        self._arrived = 0
        self._waiting = False
        self._copied = 0

    def run(self) -> None:
        """Decodes all requests."""
        self._grant()
        decoded = 0
        while decoded < self._work.requests:
            if self._complete and self._may_decode():
                self._decode(self._complete.popleft())
                decoded += 1
                self._grant()
            else:
                self._take(self._channel.receive("written", "prefilled", "digest", "waiting"))
        drive = self._drive
        self._channel.send(
            "finished", copied=self._copied, stored=drive.stored if drive else 0, loaded=drive.loaded if drive else 0
        )

    def _may_decode(self) -> bool:
        everything = self._arrived == self._work.requests
        if self._drive is not None:
            return everything
        return not self._slow or self._waiting or everything

    def _grant(self) -> None:
        """Grants free blocks. A request gets blocks only when those before have all that they need, so that one can always end."""
        while True:
            if not self._requests or self._requests[-1].due == 0:
                extra = self._all_blocks - self._prompt_blocks
                if len(self._requests) == self._work.requests or self._pool.free <= extra:
                    return
                self._requests.append(Request(self._prompt_blocks, self._pool.take(extra)))
            request = self._requests[-1]
            blocks = self._pool.take(min(self._pool.free, request.due))
            if not blocks:
                return
            request.granted += blocks
            request.due -= len(blocks)
            self._waiting = False
            self._channel.send("grant", request=len(self._requests) - 1, blocks=blocks)

    def _take(self, message: Message) -> None:
        if message.kind == "waiting":
            self._waiting = True
            return
        number = message["request"]
        if not 0 <= number < len(self._requests):
            raise PeerError(f"the other node names request {number}, which has no blocks")
        request = self._requests[number]
        if message.kind == "written":
            self._take_written(number, request, message["blocks"])
        elif message.kind == "digest":
            request.digest = message["digest"]
        else:
            if request.written != self._prompt_blocks or request.last is not None:
                raise PeerError(f"the other node ends request {number} after {request.written} of {self._prompt_blocks} blocks")
            if not 0 <= message["last"] < VOCABULARY:
                raise PeerError(f"the other node ends request {number} with the token {message['last']}, which does not exist")
            request.last = message["last"]
            self._arrived += 1
            if self._drive is not None:
                request.place = self._drive.store(request.granted)
                self._free(request)
            self._complete.append(number)
            self._grant()

    def _take_written(self, number: int, request: Request, blocks: list[int]) -> None:
        due = request.granted[request.written : request.written + len(blocks)]
        if blocks != due:
            raise PeerError(f"the other node wrote to the blocks {blocks} for request {number}, and was granted {due}")
        self._copied += self._pool.from_window(blocks)
        request.written += len(blocks)

    def _free(self, request: Request) -> None:
        self._pool.give_back(request.granted + request.extra)
        request.granted, request.extra = [], []

    def _decode(self, number: int) -> None:
        request = self._requests[number]
        if self._drive is not None and request.place is not None:
            blocks = self._pool.take(self._all_blocks)
            request.granted, request.extra = blocks[: self._prompt_blocks], blocks[self._prompt_blocks :]
            self._drive.load(request.place, request.granted)
        cache = SequenceCache(self._pool, request.granted + request.extra)
        token = request.last
        assert token is not None
        for position in range(self._work.prompt - 1, self._work.prompt - 1 + self._work.new):
            token = self._model.decode(token, position, cache)
            self._channel.send("token", request=number, token=token)
        if self._verify:
            self._compare(number, request)
        self._free(request)

    def _compare(self, number: int, request: Request) -> None:
        """Compares the whole blocks of the prompt with those of the other node."""
        while request.digest is None:
            self._take(self._channel.receive("written", "prefilled", "digest", "waiting"))
        whole = (self._work.prompt - 1) // self._model.shape.block
        if self._pool.digest(request.granted[:whole]) != request.digest:
            raise RuntimeError(f"the blocks of request {number} are not those of the other node")
