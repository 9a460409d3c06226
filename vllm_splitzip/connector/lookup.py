"""The channel by which the scheduler half asks the workers what their stores hold.

Only a worker can know: tiers such as local disk belong to its process. The scheduler sends the
hashes of a request's units to every rank and takes the longest hit that all of them have. It never
waits: a question is asked, and the answer picked up at one of vLLM's next steps.
"""

import contextlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgpack
import zmq

from ..storage.base import Health
from .hits import NO_HIT, Hit

logger = logging.getLogger(__name__)

PATIENCE_MS = 2
"""Milliseconds for an answer right after the question: spares most requests a scheduler step."""


class LookupServer:
    """Answers on a worker, in a thread of its own.

    Parameters
    ----------
    find
        (hashes of units 1 to n, most units that may be used) -> the longest stored hit.
    health
        Of the store, as it is when `find` has looked. Sent with each answer.
    """

    def __init__(
        self,
        find: Callable[[Sequence[bytes], int], Hit],
        health: Callable[[], Health] = lambda: "up",
    ) -> None:
        self._find = find
        self._health = health
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A directory of its own keeps other users of the machine out.
        self._directory = tempfile.TemporaryDirectory(prefix="splitzip-")
        self.endpoint = f"ipc://{self._directory.name}/lookup"
        self._socket.bind(self.endpoint)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="splitzip-lookup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._closing.set()
        self._thread.join()
        self._context.destroy(linger=0)
        self._directory.cleanup()

    def _serve(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(timeout=100):
                continue
            client, question = self._socket.recv_multipart()
            try:
                number, hashes, limit = msgpack.unpackb(question)
                hit = self._find(hashes, limit)
                self._socket.send_multipart([client, msgpack.packb([number, *hit, self._health()])])
            except Exception:
                logger.exception("a lookup failed; the scheduler will count it as a miss")


@dataclass(slots=True)
class _Question:
    """One request's question to all ranks, in one or more rounds."""

    number: int
    hashes: Sequence[bytes]
    limit: int
    deadline: float
    answers: dict[int, Hit] = field(default_factory=dict)


class LookupClient:
    """Asks on the scheduler side. Not thread-safe: vLLM's scheduler is its only caller.

    Parameters
    ----------
    timeout_s
        Seconds after which a question without all answers counts as a miss.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._questions: dict[str, _Question] = {}
        self._by_number: dict[int, _Question] = {}
        self._health: dict[int, Health] = {}
        self._asked = 0

    def connect(self, endpoints: Sequence[str]) -> None:
        """Connect to the servers of all ranks."""
        for endpoint in endpoints:
            socket = self._context.socket(zmq.DEALER)
            socket.connect(endpoint)
            self._sockets.append(socket)

    def ask(self, request_id: str, hashes: Sequence[bytes], limit: int) -> Hit | None:
        """The longest hit that all ranks hold; None while answers are outstanding."""
        if not self._sockets:
            return NO_HIT
        question = self._questions.get(request_id)
        if question is None:
            question = self._send(request_id, hashes, limit, time.monotonic() + self._timeout_s)
            self._receive(PATIENCE_MS)
        else:
            self._receive(0)
        return self._settle(request_id, question)

    def forget(self, request_id: str) -> None:
        """Drop a question whose request is gone."""
        question = self._questions.pop(request_id, None)
        if question is not None:
            del self._by_number[question.number]

    @property
    def store_health(self) -> Health:
        """The worst of what the ranks said of their stores with their last answers.

        A rank that did not answer in time counts as "down" until it does.
        """
        states = self._health.values()
        return "down" if "down" in states else "read-only" if "read-only" in states else "up"

    @property
    def open_questions(self) -> int:
        """Questions that were asked and neither answered by all ranks nor forgotten."""
        return len(self._questions)

    def close(self) -> None:
        """Close all connections."""
        self._context.destroy(linger=0)

    def _send(
        self, request_id: str, hashes: Sequence[bytes], limit: int, deadline: float
    ) -> _Question:
        self._asked += 1
        question = _Question(self._asked, hashes, limit, deadline)
        self._questions[request_id] = self._by_number[question.number] = question
        message = msgpack.packb([question.number, list(hashes), limit])
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):  # A full queue goes unanswered: a miss.
                socket.send(message, zmq.NOBLOCK)
        return question

    def _receive(self, timeout_ms: int) -> None:
        for rank, socket in enumerate(self._sockets):
            while socket.poll(timeout_ms):
                number, units, end, self._health[rank] = msgpack.unpackb(socket.recv())
                question = self._by_number.get(number)
                if question is not None:
                    question.answers[rank] = Hit(units, end)
                timeout_ms = 0

    def _settle(self, request_id: str, question: _Question) -> Hit | None:
        if len(question.answers) < len(self._sockets):
            if time.monotonic() < question.deadline:
                return None
            silent = set(range(len(self._sockets))) - question.answers.keys()
            self._health.update(dict.fromkeys(silent, "down"))
            self.forget(request_id)
            return NO_HIT
        self.forget(request_id)
        hits = set(question.answers.values())
        if len(hits) == 1:
            return hits.pop()
        # Ranks disagree, and a shorter prefix need not be usable on all of them: ask once more,
        # for no more than the least of them has.
        least = min(hit.end for hit in hits)
        if least == 0:
            return NO_HIT
        limit = min(question.limit, least)
        self._send(request_id, question.hashes[:least], limit, question.deadline)
        return None
