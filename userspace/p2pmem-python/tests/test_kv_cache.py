# SPDX-License-Identifier: MIT OR Apache-2.0
"""The example kv_cache.py without NICs: both nodes are threads, and a copy takes the place of the engine.

tests/suites/clients/kv.toml runs the program on two guests, with its engines.
"""

from __future__ import annotations

import ctypes
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import p2pmem
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import kv_cache  # noqa: E402
from kv import control  # noqa: E402
from kv.cache import Drive, HostMemory, Memory, Pool, SequenceCache  # noqa: E402
from kv.control import Channel, Message, PeerError  # noqa: E402
from kv.decode import Decoder  # noqa: E402
from kv.engines import Piece, TransferError  # noqa: E402
from kv.model import Model, Shape, make_prompt  # noqa: E402
from kv.prefill import Prefiller, Report, Work, compute_alone  # noqa: E402

SHAPE = Shape(layers=2, width=64, block=8)
#: Longest wait of the nodes, in seconds. A test that works never waits so long.
LIMIT = 30.0


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SHAPE)


class Copy:
    """An engine between two memories of this process. `before` is called before each write, and may change it."""

    def __init__(self, before: Callable[[Sequence[Piece]], Sequence[Piece]] = lambda pieces: pieces) -> None:
        self._before = before
        self.written = 0

    def register(self, memory: Memory) -> None: ...
    def node(self) -> dict[str, Any]:
        return {}

    def connect(self, node: dict[str, Any]) -> None: ...
    def write(self, pieces: Sequence[Piece]) -> None:
        for here, there, size in self._before(pieces):
            ctypes.memmove(there, here, size)
            self.written += size

    def close(self) -> None: ...


def host_pool(blocks: int, **options: bool) -> Pool:
    return Pool(SHAPE, HostMemory(Pool.bytes(SHAPE, blocks)), blocks, **options)


class Ended(threading.Thread):
    """A node in a thread. `end` returns its result, or raises what it raised."""

    def __init__(self, node: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        try:
            self._ended.put((self._node(), None))
        except BaseException as error:
            self._ended.put((None, error))

    def end(self) -> Any:
        result, error = self._ended.get(timeout=2 * LIMIT)
        if error is not None:
            raise error
        return result


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    here, there = tcp_pair()
    with Channel(here, LIMIT) as ours, Channel(there, LIMIT) as theirs:
        yield ours, theirs


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname(), timeout=LIMIT)
        return here, server.accept()[0]


def welcome(pool: Pool) -> Message:
    return Message(
        {"kind": "welcome", "version": control.VERSION, "address": pool.window.address, "blocks": pool.blocks, "node": {}}, 0
    )


def run(
    channels: tuple[Channel, Channel], model: Model, work: Work, theirs: Pool, *, engine: Copy | None = None, ours: Pool | None = None,
    chunk: int = 3, verify: bool = True, **options: Any,
) -> Report:
    """Runs both nodes to their end. Raises what the decoder raises, or else what the other node raises."""
    ours = ours or host_pool(work.prompt_blocks(SHAPE))

    def decode() -> None:
        try:
            Decoder(channels[1], model, theirs, work, verify=verify, **options).run()
        finally:
            channels[1].close()

    decoder = Ended(decode)
    try:
        report = Prefiller(channels[0], engine or Copy(), model, ours, welcome(theirs), work, chunk, verify=verify).run()
    finally:
        channels[0].close()
        decoder.end()
    return report


@pytest.mark.parametrize("prompt", [2, 8, 9, 33, 40])
@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("staged", [False, True])
def test_tokens_are_those_of_one_node(
    channels: tuple[Channel, Channel], model: Model, prompt: int, chunk: int, staged: bool
) -> None:
    work = Work(requests=2, prompt=prompt, new=11)
    blocks = work.prompt_blocks(SHAPE)
    report = run(
        channels, model, work, host_pool(2 * work.all_blocks(SHAPE), staged=staged, guarded=True),
        ours=host_pool(blocks, staged=staged), chunk=chunk,
    )
    assert report.tokens == compute_alone(model, work).tokens
    assert report.moved == 2 * Pool.bytes(SHAPE, blocks)
    assert report.copied == (2 * report.moved if staged else 0)
    assert len(report.first_token) == 2 and all(seconds > 0 for seconds in report.first_token)


def test_every_page_changes_the_tokens() -> None:
    model = Model(Shape())
    work = Work(requests=1, prompt=129, new=16)
    blocks = work.all_blocks(model.shape)
    pool = Pool(model.shape, HostMemory(Pool.bytes(model.shape, blocks)), blocks)
    prompt, table = make_prompt(0, work.prompt), pool.take(blocks)
    cache = SequenceCache(pool, table)
    for first in range(0, work.prompt - 1, model.shape.block):
        model.prefill(prompt, first, cache)

    def decode() -> list[int]:
        tokens = [prompt[-1]]
        for position in range(work.prompt - 1, work.prompt - 1 + work.new):
            tokens.append(model.decode(tokens[-1], position, cache))
        return tokens[1:]

    wanted = decode()
    assert wanted == compute_alone(model, work).tokens[0] and len(set(wanted)) > 8
    for page in pool.pages(table[: work.prompt_blocks(model.shape)]):
        content = pool.memory.read(model.shape.page_bytes, page)
        pool.memory.write(bytes(byte ^ 0x80 if index % 4 == 3 else byte for index, byte in enumerate(content)), page)
        assert decode() != wanted, page
        pool.memory.write(content, page)


def test_a_slow_decoder_holds_the_other_node_back(channels: tuple[Channel, Channel], model: Model) -> None:
    work = Work(requests=3, prompt=41, new=6)
    theirs = host_pool(work.all_blocks(SHAPE) + 2, guarded=True)
    report = run(channels, model, work, theirs, chunk=2, slow=True)
    # Each request but the first waits until the one before is decoded.
    assert report.waits >= 2 and report.waiting > 0
    assert report.tokens == compute_alone(model, work).tokens
    assert theirs.free == theirs.blocks


def test_no_write_without_a_grant(channels: tuple[Channel, Channel], model: Model) -> None:
    work = Work(requests=4, prompt=41, new=6)
    theirs = host_pool(work.all_blocks(SHAPE) + 3, guarded=True)
    granted: set[int] = set()
    send, take = channels[1].send, theirs.give_back

    def record_grant(kind: str, **values: Any) -> None:
        if kind == "grant":
            granted.update(values["blocks"])
        send(kind, **values)

    def record_end(blocks: Any) -> None:
        granted.difference_update(blocks)
        take(blocks)

    channels[1].send, theirs.give_back = record_grant, record_end  # type: ignore[method-assign]

    def check(pieces: Sequence[Piece]) -> Sequence[Piece]:
        for _, there, size in pieces:
            first = (there - theirs.window.address) // SHAPE.page_bytes
            assert {page % theirs.blocks for page in range(first, first + size // SHAPE.page_bytes)} <= granted
        return pieces

    report = run(channels, model, work, theirs, engine=Copy(check))
    assert report.tokens == compute_alone(model, work).tokens


def test_a_write_without_a_grant_is_found(channels: tuple[Channel, Channel], model: Model) -> None:
    work = Work(requests=2, prompt=17, new=2)
    theirs = host_pool(work.all_blocks(SHAPE) + 1, guarded=True)
    # The first request needs all blocks but one. The second one takes it.
    last = theirs.blocks - 1
    there = theirs.window.address + theirs.offset(1, last)
    engine = Copy(lambda pieces: [*pieces, (pieces[0][0], there, SHAPE.page_bytes)])
    with pytest.raises(RuntimeError, match=f"block {last} was written while nobody had it"):
        run(channels, model, work, theirs, engine=engine, slow=True)


def test_other_blocks_are_found(channels: tuple[Channel, Channel], model: Model) -> None:
    work = Work(requests=1, prompt=33, new=2)
    theirs = host_pool(work.all_blocks(SHAPE))
    with pytest.raises(RuntimeError, match="the blocks of request 0 are not those of the other node"):
        run(channels, model, work, theirs, engine=Copy(lambda pieces: pieces[1:]))


def test_eviction(channels: tuple[Channel, Channel], model: Model, device: p2pmem.Device, direct: Path) -> None:
    shape = Shape(layers=2, width=64, block=8)
    assert shape.page_bytes == 4096
    work = Work(requests=3, prompt=41, new=6)
    blocks = work.all_blocks(shape)
    with device.alloc(Pool.bytes(shape, blocks)) as buffer:
        pool = Pool(shape, buffer, blocks, guarded=True)
        with Drive(str(direct), pool) as drive:
            report = run(channels, model, work, pool, drive=drive)
    assert report.tokens == compute_alone(model, work).tokens
    assert report.stored == report.loaded == report.moved == 3 * Pool.bytes(shape, work.prompt_blocks(shape))


def test_a_drive_that_loses_blocks(channels: tuple[Channel, Channel], model: Model, device: p2pmem.Device, direct: Path) -> None:
    work = Work(requests=1, prompt=41, new=6)
    with device.alloc(Pool.bytes(SHAPE, 6)) as buffer:
        pool = Pool(SHAPE, buffer, 6)
        with Drive(str(direct), pool) as drive:
            store = drive.store

            def lose(blocks: Sequence[int]) -> int:
                place = store(blocks)
                direct.write_bytes(b"")
                return place

            drive.store = lose  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="the drive has 0 bytes of a page of 4096"):
                run(channels, model, work, pool, drive=drive)


def test_drives_need_whole_pages(device: p2pmem.Device, direct: Path) -> None:
    shape = Shape(layers=1, width=32, block=8)
    with device.alloc(shape.page_bytes) as buffer, pytest.raises(ValueError, match="a page has 2048 bytes"):
        Drive(str(direct), Pool(shape, buffer, 1))


def test_a_pool_that_is_too_small(channels: tuple[Channel, Channel], model: Model) -> None:
    with pytest.raises(ValueError, match="a request needs 6 blocks, and this node has 5: use --blocks"):
        run(channels, model, Work(requests=1, prompt=41, new=6), host_pool(5))


@pytest.mark.parametrize("dies", ["prefill", "decode"])
def test_a_node_that_dies_in_the_middle(channels: tuple[Channel, Channel], model: Model, dies: str) -> None:
    work = Work(requests=3, prompt=41, new=6)
    memory = HostMemory(Pool.bytes(SHAPE, 8))
    victim = channels[0] if dies == "prefill" else channels[1]
    engine = Copy()

    def die(pieces: Sequence[Piece]) -> Sequence[Piece]:
        if engine.written:
            victim.close()
        return pieces

    engine._before = die
    begun = time.monotonic()
    with pytest.raises(PeerError, match="the other node has ended"):
        run(channels, model, work, Pool(SHAPE, memory, 8), engine=engine)
    assert time.monotonic() - begun < LIMIT
    # The memory serves the next node.
    again = tcp_pair()
    with Channel(again[0], LIMIT) as ours, Channel(again[1], LIMIT) as theirs:
        report = run((ours, theirs), model, work, Pool(SHAPE, memory, 8, guarded=True))
    assert report.tokens == compute_alone(model, work).tokens


def test_an_engine_that_fails(channels: tuple[Channel, Channel], model: Model) -> None:
    def fail(_: Sequence[Piece]) -> Sequence[Piece]:
        raise TransferError("a write failed")

    work = Work(requests=1, prompt=41, new=6)
    decoder = Ended(Decoder(channels[1], model, host_pool(6), work).run)
    pool = host_pool(5)
    with kv_cache.report_failure(channels[0]), pytest.raises(TransferError):
        Prefiller(channels[0], Copy(fail), model, pool, welcome(host_pool(6)), work, 1, verify=False).run()
    channels[0].close()
    with pytest.raises(PeerError, match="the other node has ended"):
        decoder.end()


MESSAGES: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r", "no message of this program"),
    (b"[1]", "unknown kind"),
    (b'{"kind": ["grant"]}', "unknown kind"),
    (b'{"kind": "grants"}', "unknown kind"),
    (b'{"kind": "welcome", "version": 2}', f"has version 2 of the protocol, this one {control.VERSION}: start the same"),
    (b'{"kind": "hello"}', "has version None of the protocol"),
    (b'{"kind": "hello", "version": 1, "engine": "nixl"}', "a message hello without path"),
    (b'{"kind": "grant", "request": true, "blocks": []}', "a message grant without request"),
    (b'{"kind": "grant", "request": 0, "blocks": {}}', "a message grant without blocks"),
    (b'{"kind": "grant", "request": 0, "blocks": [1, "2"]}', "blocks that are no numbers"),
    (b'{"kind": "token", "request": 0, "token": 1.5}', "a message token without token"),
    (b'{"kind": "error", "message": "no memory"}', "the other node failed: no memory"),
]


@pytest.mark.parametrize(("line", "wanted"), MESSAGES, ids=lambda value: None if isinstance(value, bytes) else value[:20])
def test_bad_messages(line: bytes, wanted: str) -> None:
    here, there = tcp_pair()
    with Channel(here, LIMIT) as channel, there:
        there.sendall(line + b"\n")
        for _ in range(2):
            with pytest.raises(PeerError, match=wanted):
                channel.receive("grant")
            if b"error" in line:
                break


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (b'{"kind": "grant", "requ', "a part of a message, and has ended"),
        (b"", "the other node has ended$"),
        (b"x" * control.MOST, "a message that is too long"),
    ],
    ids=["truncated", "nothing", "long"],
)
def test_messages_that_do_not_end(sent: bytes, wanted: str) -> None:
    here, there = tcp_pair()
    with Channel(here, LIMIT) as channel:
        with there:
            sender = Ended(lambda: there.sendall(sent))
            sender.end()
        with pytest.raises(PeerError, match=wanted):
            channel.receive("grant")
        with pytest.raises(PeerError, match=wanted):
            channel.poll("grant")


def test_a_node_that_says_nothing() -> None:
    here, there = tcp_pair()
    with there, Channel(here, 1) as channel, pytest.raises(PeerError, match="has sent nothing for 1 s"):
        channel.receive("grant")
    with control.listen(0) as server, pytest.raises(PeerError, match="no node has connected within 1 s"):
        Channel.accept(server, 1)


def test_a_node_that_does_not_read() -> None:
    here, there = tcp_pair()
    with there, Channel(here, 1) as channel, pytest.raises(PeerError, match="the other node has ended"):
        while True:
            channel.send("error", message="x" * 100000)


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([("written", {"request": 0, "blocks": [0]})], r"wrote to the blocks \[0\] for request 0, and was granted \[1\]"),
        ([("written", {"request": 1, "blocks": [1]})], "names request 1, which has no blocks"),
        ([("written", {"request": -1, "blocks": [1]})], "names request -1, which has no blocks"),
        ([("prefilled", {"request": 0, "last": 1})], "ends request 0 after 0 of 5 blocks"),
        ([("written", {"request": 0, "blocks": [1, 2, 3, 4, 5, 6]})], "wrote to the blocks"),
        ([("written", {"request": 0, "blocks": [1, 2, 3, 4, 5]}), ("prefilled", {"request": 0, "last": 512})], "which does not exist"),
        ([("token", {"request": 0, "token": 1})], "sends token, not written or"),
    ],
)
def test_the_decoder_refuses(
    channels: tuple[Channel, Channel], model: Model, messages: list[tuple[str, dict[str, Any]]], wanted: str
) -> None:
    decoder = Ended(Decoder(channels[1], model, host_pool(6), Work(requests=2, prompt=41, new=6)).run)
    grant = channels[0].receive("grant")
    assert (grant["request"], grant["blocks"]) == (0, [1, 2, 3, 4, 5])
    for kind, values in messages:
        channels[0].send(kind, **values)
    with pytest.raises(PeerError, match=wanted):
        decoder.end()


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        ("grant", {"request": 0, "blocks": [6]}, r"grants the blocks \[6\], and has 6"),
        ("grant", {"request": 0, "blocks": [-1]}, r"grants the blocks \[-1\]"),
        ("grant", {"request": 1, "blocks": []}, "names request 1 of 1"),
        ("token", {"request": -1, "token": 1}, "names request -1 of 1"),
        ("finished", {"copied": 0, "stored": 0, "loaded": 0}, "sends finished, not token or grant"),
    ],
)
def test_the_other_node_refuses(
    channels: tuple[Channel, Channel], model: Model, kind: str, values: dict[str, Any], wanted: str
) -> None:
    channels[1].send(kind, **values)
    work = Work(requests=1, prompt=41, new=6)
    node = Prefiller(channels[0], Copy(), model, host_pool(5), welcome(host_pool(6)), work, 1, verify=False)
    with pytest.raises(PeerError, match=wanted):
        node.run()


def test_different_options() -> None:
    hello = Message({"kind": "hello", "block": 16, "engine": "nixl", "path": "direct"}, 0)
    with pytest.raises(ValueError, match="different options: --block 16 and 8, --engine nixl and mooncake"):
        kv_cache.compare(hello, {"block": 8, "engine": "mooncake", "path": "direct"})


def test_shapes_and_work() -> None:
    for wrong in ({"layers": 0}, {"width": 48}, {"width": 0}, {"block": 0}):
        with pytest.raises(ValueError, match="a multiple of 32"):
            Shape(**wrong)
    for numbers in ((0, 2, 1), (1, 1, 1), (1, 2, 0)):
        with pytest.raises(ValueError, match="at least one request"):
            Work(*numbers)


def test_pools() -> None:
    pool = host_pool(3)
    blocks = pool.take(2)
    with pytest.raises(ValueError, match="2 blocks, but only 1 are free"):
        pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(ValueError, match="block 0 is not taken"):
        pool.give_back([0])
    # Blocks that were given back are taken last.
    assert pool.take(3) == [2, 0, 1]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "kv_cache.py"), *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_command_on_one_node() -> None:
    done = command("single", "--json", "--layers", "2", "--width", "64", "--block", "8", "--prompt-tokens", "41", "--requests", "2")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["tokens"] == compute_alone(Model(SHAPE), Work(2, 41, 16)).tokens
    assert report["engine"] == "one node" and report["tokens_equal"] is None


@pytest.mark.parametrize(
    ("words", "code", "wanted"),
    [
        ([], 2, "arguments are required: role"),
        (["decode", "--address", "127.0.0.1", "--engine", "tcp"], 2, "invalid choice: 'tcp'"),
        (["decode", "--address", "127.0.0.1", "--blocks", "0"], 2, "--blocks is at least 1"),
        (["single", "--block", "0"], 1, "kv_cache: Shape"),
        (["prefill", "--address", "127.0.0.1", "--server", "127.0.0.1", "--port", "1", "--timeout", "1"], 1, "start the node that decodes"),
        (["decode", "--address", "127.0.0.1", "--port", "0", "--timeout", "1"], 1, "no node has connected within 1 s"),
    ],
)
def test_wrong_commands(words: list[str], code: int, wanted: str) -> None:
    done = command(*words)
    assert done.returncode == code and wanted in done.stderr and "Traceback" not in done.stderr, done.stderr
