"""Headers as they come in: a thread listens to each peer, so that a rank hears the others wherever its program is.

A header that asks for something and that nobody takes is answered by one more thread (`serve`): the program may
be in code that knows nothing of zeropage, for example in a collective call of its own, in which it waits for the
very rank that asks. The listeners do nothing but listen: a header is not sent before its receiver is there.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from zeropage.transport.channel import HostChannel

__all__ = ["HEADER", "Inbox", "Lost"]

HEADER = 1024  # bytes of every header; the first one says what kind of header it is
_ASKS, _WAITS, _LEAVES = 1, 2, 3
_FOREVER = timedelta(days=1000)
_GRACE_SECONDS = 0.01  # ranks that run side by side ask within this of each other, and share a round
_FAREWELL_SECONDS = 1.0


class Lost(Exception):
    """The peer has left, died, or (`late`) sent nothing in time."""

    def __init__(self, peer: int, *, late: bool) -> None:
        super().__init__(peer)
        self.peer, self.late = peer, late


class Inbox:
    """The headers of all peers, each peer's in order.

    Args:
        channel: brings the headers.
        peers: the other ranks.
        serve: a bound method, called in a thread of its own with a peer whose header nobody took; kept weakly.
    """

    def __init__(self, channel: HostChannel, peers: Sequence[int], serve: Callable[[int], None]) -> None:
        self._channel = channel
        self._serve = weakref.WeakMethod(serve)
        self._came = threading.Condition()
        self._heads: dict[int, deque[bytes]] = {peer: deque() for peer in peers}
        self._gone: dict[int, int | None] = {}  # who has left or died, and whom it had lost before
        self._lost: int | None = None
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child: the threads and the connections are its parent's."""
        return os.getpid() != self._process

    def start(self) -> None:
        """Begin to listen; harmless when it has begun."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=_answer, args=(self,), name="zeropage answers its peers", daemon=True)
            ]
            for peer in self._heads:
                name = f"zeropage listens to rank {peer}"
                self._threads.append(threading.Thread(target=_listen, args=(self, peer), name=name, daemon=True))
            for thread in self._threads:
                thread.start()

    def post(self, body: bytes, *, asks: bool) -> list[tuple[int, Any]]:
        """Begin to send a header to every peer; `asks`: it needs an answer wherever the peer's program is.

        Raises:
            Lost: a peer has left or died.
        """
        head = _head(_ASKS if asks else _WAITS, body)
        return [(peer, self._send(head, peer)) for peer in self._heads]

    def take(self, peer: int, timeout_s: float) -> bytes:
        """The next header of `peer`, without its first byte.

        Raises:
            Lost: it has left, died, or sent none within `timeout_s`.
        """
        heads = self._heads[peer]
        with self._came:
            self._came.wait_for(lambda: heads or peer in self._gone, timeout_s)
            if not heads:
                raise Lost(peer, late=peer not in self._gone)
            head = heads.popleft()
            self._came.notify_all()
            return head[1:]

    def lost_by(self, peer: int) -> int | None:
        """The rank that `peer`, which is gone, had lost itself."""
        with self._came:
            self._came.wait_for(lambda: peer in self._gone, _FAREWELL_SECONDS)  # data may be missed before the header
            return self._gone.get(peer)

    def lose(self, peer: int) -> None:
        """This rank has lost `peer`. Those that wait for this one will find it gone too, and why in its farewell."""
        if self._lost is None:
            self._lost = peer

    def pending(self, peer: int) -> bool:
        return bool(self._heads[peer])

    def close(self) -> None:
        """Tell the peers that this rank leaves, and end the threads. A forked child leaves nothing."""
        if self.forked:
            self._channel.abandon()
            return
        with self._came:
            self._closed = True
            self._came.notify_all()
        if self._threads:
            for peer in self._heads:
                if peer not in self._gone:
                    self._say_farewell(peer)
        ends = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends - time.monotonic()))

    def _send(self, head: torch.Tensor, peer: int) -> Any:
        try:
            return self._channel.send_header(head, peer)
        except RuntimeError:
            raise Lost(peer, late=False) from None

    # -- in the threads

    def _put(self, peer: int, head: bytes) -> None:
        with self._came:
            self._heads[peer].append(head)
            self._came.notify_all()

    def _leaves(self, peer: int, lost: int | None) -> None:
        with self._came:
            self._gone[peer] = lost
            self._came.notify_all()

    def _say_farewell(self, peer: int) -> None:
        with contextlib.suppress(RuntimeError):  # a peer that died needs none
            farewell = _head(_LEAVES, b"" if self._lost is None else str(self._lost).encode())
            self._channel.send_header(farewell, peer).wait(timedelta(seconds=_FAREWELL_SECONDS))

    def _unanswered(self) -> tuple[int, bytes] | None:
        """A header that asks, with its peer."""
        for peer, heads in self._heads.items():
            if heads and heads[0][0] == _ASKS:
                return peer, heads[0]
        return None

    def _is_settled(self, peer: int, head: bytes) -> bool:
        """Whether somebody took this header, or nobody has to any more."""
        heads = self._heads[peer]
        return self._closed or not heads or heads[0] is not head


def _listen(inbox: Inbox, peer: int) -> None:
    head = torch.empty(HEADER, dtype=torch.uint8, device="cpu")
    while True:
        try:
            inbox._channel.receive_header(head, peer).wait(_FOREVER)
        except RuntimeError:  # the connection broke
            inbox._leaves(peer, None)
            return
        data = head.numpy().tobytes()
        if data[0] == _LEAVES:
            lost = data[1:].rstrip(b"\0")
            inbox._leaves(peer, int(lost) if lost else None)
            if not inbox._closed:
                inbox._say_farewell(peer)  # so that its own thread for this rank ends
            return
        inbox._put(peer, data)


def _answer(inbox: Inbox) -> None:
    came = inbox._came
    while True:
        with came:
            came.wait_for(lambda: inbox._closed or inbox._unanswered())
            asked = inbox._unanswered()
            if inbox._closed or asked is None:
                return
            peer, head = asked
            if came.wait_for(partial(inbox._is_settled, peer, head), _GRACE_SECONDS):
                continue
        serve = inbox._serve()
        if serve is None:
            return
        serve(peer)
        del serve  # it keeps its object alive


def _head(kind: int, body: bytes) -> torch.Tensor:
    assert len(body) < HEADER
    return torch.frombuffer(bytearray(bytes([kind]) + body).ljust(HEADER, b"\0"), dtype=torch.uint8)
