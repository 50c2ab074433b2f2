"""Out-of-band messages: the few bytes by which planes of different ranks connect, exchanged through rank 0.

A plane connects in the middle of a plan, or in a library's thread while this rank waits in one. What a rank publishes stays
at the coordinator until another fetches it, so a text travels only between ranks that connect. What all ranks of a process
set must know of each other is gathered by the first of them, which answers all. A death interrupts every wait.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from hvdlite.core.errors import HorovodInternalError
from hvdlite.handoff.inbox import Item, Task
from hvdlite.negotiation.messages import OobKey, OobMessage, SideMessage
from hvdlite.planes.base import WaitUntil

IGNORED: Final = 256
"""How many labels are remembered whose announcements are dropped."""
ANNOUNCED: Final = "announced."
"""How labels of announcements begin."""


class OobChannel:
    """One rank's out-of-band channel; implements `planes.base.OobChannel`.

    Methods marked "from any thread" are called by other threads, too; the rest by the background thread only.

    Args:
        rank: this one.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._arrived = threading.Condition()
        self._received: dict[OobKey, bytes] = {}
        self._announced: defaultdict[str, deque[tuple[int, bytes]]] = defaultdict(deque)  # announcements without a listener
        self._listeners: dict[str, Callable[[int, bytes], None]] = {}
        self._ignored: dict[str, None] = {}  # in the order of `ignore`
        self._waiting: list[threading.Lock] = []
        self._failure: HorovodInternalError | None = None
        self._send: Callable[[SideMessage], None] = lambda side_message: None
        self._post: Callable[[Item], None] = lambda item: None
        self._thread = 0  # the background thread, once it has published something

    def connect(self, send: Callable[[SideMessage], None], post: Callable[[Item], None]) -> None:
        """Let what is published from now on travel.

        Args:
            send: sends a side message; only the background thread calls it.
            post: hands something to the background thread; from any thread.
        """
        self._send, self._post = send, post

    def receive(self, messages: Iterable[OobMessage]) -> None:
        """Store out-of-band messages that have arrived."""
        with self._arrived:
            for note in messages:
                if note.label in self._ignored:
                    continue
                if note.label.startswith(ANNOUNCED):
                    self._announced[note.label].append((note.sender, note.payload))
                    self._listen(note.label)
                else:
                    self._received[OobKey(note.label, note.sender)] = note.payload
            self._arrived.notify_all()
        self._notify()

    def close(self, failure: HorovodInternalError) -> None:
        """Nothing arrives any more: raise that wherever something is waited for."""
        with self._arrived:
            self._failure = failure
            self._arrived.notify_all()
        self._notify()

    def publish(self, label: str, text: bytes) -> None:
        self._thread = threading.get_ident()
        self._send(SideMessage(oob_messages=(OobMessage(label, self._rank, text),)))

    def withdraw(self, label: str) -> None:
        self._send(SideMessage(oob_withdrawn=(label,)))

    def fetch(self, label: str, sender: int, wait_until: WaitUntil,
              is_cancelled: Callable[[], bool] = lambda: False) -> bytes:
        wanted = OobKey(label, sender)
        side_message = SideMessage(oob_requests=(wanted,))
        if threading.get_ident() == self._thread:
            self._send(side_message)
            wait_until(lambda: wanted in self._received)
        else:
            self._post(Task(lambda: self._send(side_message)))
            with self._arrived:
                self._arrived.wait_for(lambda: wanted in self._received or self._failure is not None or is_cancelled())
        with self._arrived:
            if wanted not in self._received:
                raise self._failure or HorovodInternalError(f"nothing waits any more for what rank {sender} publishes")
            return self._received.pop(wanted)

    def look(self) -> None:
        with self._arrived:
            self._arrived.notify_all()
        self._notify()

    def publish_from(self, label: str, text: bytes) -> None:
        """Like `publish`, from any other thread than the background thread."""
        self._post(Task(lambda: self._send(SideMessage(oob_messages=(OobMessage(label, self._rank, text),)))))

    def announce(self, label: str, receivers: Sequence[int], text: bytes) -> None:
        """Send a text to ranks that `subscribe` to the label; from any thread."""
        message = OobMessage(ANNOUNCED + label, self._rank, text, tuple(receivers))
        self._post(Task(lambda: self._send(SideMessage(oob_messages=(message,)))))

    def subscribe(self, label: str, listener: Callable[[int, bytes], None]) -> None:
        """Let a function be called with the sender and text of each announcement, those included that have come before.

        The background thread calls it, or this one; it returns at once. Any thread may call this.
        """
        with self._arrived:
            self._listeners[ANNOUNCED + label] = listener
            self._listen(ANNOUNCED + label)

    def _listen(self, label: str) -> None:
        listener, texts = self._listeners.get(label), self._announced[label]
        while listener is not None and texts:
            listener(*texts.popleft())

    def take(self, label: str) -> list[tuple[int, bytes]]:
        """Return the announcements that have come without a subscriber, and forget them; from any thread."""
        with self._arrived:
            texts = list(self._announced.pop(ANNOUNCED + label, ()))
        return texts

    def give_back(self, label: str, texts: Sequence[tuple[int, bytes]]) -> None:
        """Put announcements back for whoever takes the next ones; from any thread."""
        if texts:
            with self._arrived:
                self._announced[ANNOUNCED + label].extendleft(reversed(texts))
            self._notify()

    def wait(self, is_over: Callable[[], object], until: float) -> bool:
        """Wait until something is true, which is looked at when something has come or a rank has left; from any thread.

        Args:
            until: in `time.monotonic()`; then the answer is False.

        Raises:
            HorovodInternalError: when the job ends first.
        """
        news = threading.Lock()  # released when there is something to look at
        self._waiting.append(news)
        try:
            while not is_over():
                if self._failure is not None:
                    raise self._failure.with_traceback(None)
                rest = until - time.monotonic()
                if rest <= 0:
                    return False
                news.acquire(timeout=min(rest, threading.TIMEOUT_MAX))
            return True
        finally:
            self._waiting.remove(news)

    def _notify(self) -> None:
        """Let those in `wait` look, without a lock that one of them may hold in a signal handler."""
        for news in list(self._waiting):
            with contextlib.suppress(RuntimeError):  # it is about to look anyway
                news.release()

    def ignore(self, label: str) -> None:
        """End a subscription; what comes within the next few of these calls is dropped. From any thread."""
        with self._arrived:
            self._listeners.pop(ANNOUNCED + label, None)
            self._announced.pop(ANNOUNCED + label, None)
            self._ignored[ANNOUNCED + label] = None
            while len(self._ignored) > IGNORED:
                del self._ignored[next(iter(self._ignored))]

    def withdraw_from(self, label: str) -> None:
        """Like `withdraw`, likewise."""
        self._post(Task(lambda: self.withdraw(label)))

    def gather_and_broadcast(self, label: str, ranks: Sequence[int], text: bytes, answer: Callable[[list[bytes]], bytes],
                wait_until: WaitUntil) -> bytes:
        first, question = ranks[0], f"{label}?"
        self._send(SideMessage(oob_messages=(OobMessage(question, self._rank, text, (first,)),)))
        if self._rank == first:
            asked = [OobKey(question, rank) for rank in ranks]
            wait_until(lambda: all(each in self._received for each in asked))
            answered = answer([self._received.pop(each) for each in asked])
            self._send(SideMessage(oob_messages=(OobMessage(label, first, answered, tuple(ranks)),)))
        reply = OobKey(label, first)
        wait_until(lambda: reply in self._received)
        return self._received.pop(reply)
