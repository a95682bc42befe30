# SPDX-License-Identifier: MIT OR Apache-2.0
"""The connection by which the two nodes agree: messages over TCP, each with a limit of its size and of the wait for it.

A message is a JSON object on a line. Its member `kind` says which other members it has, see `KINDS`. The payload never uses this connection.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Any

#: The version of the messages. A node refuses another one.
VERSION = 1
#: Most bytes of a message.
MOST = 1 << 20

#: The members of each kind of message, with their types.
KINDS: dict[str, dict[str, type]] = {
    # From the node that prefills: what it is about to do, which blocks have the next part of a prompt, that a prompt is complete and what
    # its last token is, the hash of its whole blocks, and that there is no block to write to.
    "hello": {"version": int, "engine": str, "path": str, "layers": int, "width": int, "block": int, "requests": int,
              "prompt": int, "new": int, "verify": bool, "node": dict},
    "written": {"request": int, "blocks": list},
    "prefilled": {"request": int, "last": int},
    "digest": {"request": int, "digest": str},
    "waiting": {},
    # From the node that decodes: where its pool is, which blocks may be written, a token, and what it has done.
    "welcome": {"version": int, "address": int, "blocks": int, "node": dict},
    "grant": {"request": int, "blocks": list},
    "token": {"request": int, "token": int},
    "finished": {"copied": int, "stored": int, "loaded": int},
    # From either node: why it ends.
    "error": {"message": str},
}


class PeerError(RuntimeError):
    """The other node has ended, does not respond, or sends what it should not."""


class Message:
    """A message that has arrived."""

    def __init__(self, values: dict[str, Any], arrived: float) -> None:
        self.kind: str = values["kind"]
        #: When it arrived, as of time.monotonic().
        self.arrived = arrived
        self._values = values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]


def parse(line: bytes) -> dict[str, Any]:
    """Checks a message. Raises PeerError if it is none."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the other node sends no message of this program: {line[:40]!r}") from error
    kind = values.get("kind") if isinstance(values, dict) else None
    members = KINDS.get(kind) if isinstance(kind, str) else None
    if members is None:
        raise PeerError(f"the other node sends a message of an unknown kind: {line[:40]!r}")
    # Another version may have other members: its number is what the user has to know.
    version = values.get("version")
    if "version" in members and version != VERSION:
        raise PeerError(
            f"the other node has version {version} of the protocol, this one {VERSION}: start the same program on both"
        )
    for name, wanted in members.items():
        if type(values.get(name)) is not wanted:
            raise PeerError(f"the other node sends a message {kind} without {name}")
        if wanted is list and not all(type(item) is int for item in values[name]):
            raise PeerError(f"the other node sends a message {kind} with {name} that are no numbers")
    return dict(values)


def listen(port: int) -> socket.socket:
    """Listens on a TCP port of all addresses."""
    return socket.create_server(("", port))


class Channel:
    """A connection. A thread receives, so messages have the time of their arrival, also while this node computes."""

    def __init__(self, connection: socket.socket, limit: float) -> None:
        """Takes a connected socket. `limit` is the longest wait for a message and for sending one, in seconds."""
        self._connection, self._limit = connection, limit
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that has lost its power does not close its connections.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(limit) + 1, 0))
        for option, seconds in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit * 1000))
        self._arrived: queue.SimpleQueue[Message | PeerError] = queue.SimpleQueue()
        self._receiver = threading.Thread(target=self._receive, daemon=True)
        self._receiver.start()

    @classmethod
    def accept(cls, server: socket.socket, limit: float) -> Channel:
        """Waits for a node that connects. Raises PeerError after `limit` seconds."""
        server.settimeout(limit)
        try:
            connection, _ = server.accept()
        except TimeoutError:
            raise PeerError(f"no node has connected within {limit:g} s: start the node that prefills") from None
        return cls(connection, limit)

    @classmethod
    def connect(cls, address: str, port: int, limit: float) -> Channel:
        """Connects, and tries again while the other node does not listen. Raises PeerError after `limit` seconds."""
        end = time.monotonic() + limit
        while True:
            try:
                return cls(socket.create_connection((address, port), timeout=limit), limit)
            except OSError as error:
                if time.monotonic() >= end:
                    raise PeerError(f"cannot connect to {address} port {port}: {error}: start the node that decodes") from error
                # Nothing announces that the other node listens.
                time.sleep(0.1)

    def send(self, kind: str, **values: Any) -> None:
        """Sends a message. Raises PeerError if the other node has ended."""
        message = json.dumps({"kind": kind, **values}).encode() + b"\n"
        try:
            self._connection.sendall(message)
        except OSError as error:
            # What it said before it ended is a better reason.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._check(self._arrived.get(timeout=1))
            raise PeerError(f"the other node has ended: {error}") from error

    def receive(self, *kinds: str) -> Message:
        """Waits for a message, which has to be of one of the kinds. Raises PeerError if it is another one, or if none arrives within
        the limit.
        """
        try:
            arrived = self._arrived.get(timeout=self._limit)
        except queue.Empty:
            raise PeerError(f"the other node has sent nothing for {self._limit:g} s: is it alive?") from None
        return self._check(arrived, *kinds)

    def poll(self, *kinds: str) -> Message | None:
        """Returns a message that has arrived, or None. Raises PeerError as `receive` does."""
        try:
            return self._check(self._arrived.get_nowait(), *kinds)
        except queue.Empty:
            return None

    def _check(self, arrived: Message | PeerError, *kinds: str) -> Message:
        if isinstance(arrived, PeerError):
            # It is the last one, and says the same to the next wait.
            self._arrived.put(arrived)
            raise arrived
        if arrived.kind == "error":
            raise PeerError(f"the other node failed: {arrived['message']}")
        if kinds and arrived.kind not in kinds:
            raise PeerError(f"the other node sends {arrived.kind}, not {' or '.join(kinds)}")
        return arrived

    def _receive(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                while line := stream.readline(MOST):
                    if not line.endswith(b"\n"):
                        what = "a message that is too long" if len(line) == MOST else "a part of a message, and has ended"
                        raise PeerError(f"the other node has sent {what}")
                    self._arrived.put(Message(parse(line), time.monotonic()))
            self._arrived.put(PeerError("the other node has ended"))
        except PeerError as error:
            self._arrived.put(error)
        except Exception as error:
            self._arrived.put(PeerError(f"the connection to the other node has ended: {error}"))

    def close(self) -> None:
        """Ends the connection. The other node receives what was sent before, for which it has a second."""
        for how in (socket.SHUT_WR, socket.SHUT_RDWR):
            with contextlib.suppress(OSError):
                self._connection.shutdown(how)
            self._receiver.join(1)
        self._connection.close()

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
