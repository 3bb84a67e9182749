"""The consumer's side of the wire: one connection per producer, driven by whichever thread calls :meth:`Channel.poll`.

A channel keeps the peers and their sockets. What is to be sent, resent and given up is decided by each
:class:`~kvlease.core.peers.Peer`; here it happens. Invariants:

- Nothing blocks: a frame that cannot be sent is dropped and counted, and the call's resend makes up for it; names are
  looked up elsewhere.
- Nothing that a peer sends, and no address it is said to have, raises out of :meth:`Channel.poll`.
- A poll costs what there is to do, however many peers there are.
- A dead peer's socket is closed, with whatever waited in it, and trying again starts afresh: no stale connection and no
  stale request outlives a peer's death.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import zmq

from kvlease.core.ids import PeerKey
from kvlease.core.messages import REQUEST_BYTES_MAX, AnyReply, AnyRequest, ProtocolError, decode_reply, encode
from kvlease.core.peers import Event, Peer, PeerBack, PeerDied, PeerForgotten, TooManyPeers
from kvlease.core.silence import PeerTiming
from kvlease.core.timers import Timers
from kvlease.logs import RateLimitedLog
from kvlease.net.resolve import Lookup, Resolver, is_host_name, look_up, numeric_host, zmq_address
from kvlease.net.sockets import Sockets

logger = logging.getLogger(__name__)

_DEATHS: Final = {
    "silent": "it is silent although it was asked",
    "timeout": "nothing there answers",
    "unreachable": "its address leads nowhere",
    "peer_restarted": "another incarnation answers at its address",
}

_FDS_PER_PEER: Final = 4
"""File descriptors that one peer may take, with room left for everybody else in the process."""

_SWEEPS: Final = 10
"""How often within its idle time a peer is looked at."""


@dataclass(eq=False)
class _Link:
    """One peer, and when it last said or was asked something."""

    peer: Peer
    used_at: float

    @property
    def is_idle(self) -> bool:
        return not self.peer.is_busy and not self.peer.pinned


class Channel:
    """See the module. Everything but :meth:`wake` belongs to one thread.

    ``idle_s``: a peer without calls, watchers or pin is forgotten after that long (:class:`PeerForgotten` tells). With
    ``max_peers`` open, one more takes the place of the one that has been idle longest; where the process may open few
    files, there are fewer. A :class:`Peer` that its owner kept beyond that is taken up again as soon as it is used.
    """

    def __init__(
        self,
        timing: PeerTiming,
        clock: Callable[[], float] = time.monotonic,
        *,
        idle_s: float = 300.0,
        max_peers: int = 4096,
        lookup: Lookup = look_up,
        make_sockets: Callable[[int], Sockets] = Sockets,
    ) -> None:
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.max_peers = max(1, min(max_peers, soft_limit // _FDS_PER_PEER))
        self._timing = timing
        self._clock = clock
        self._idle_s = idle_s
        self._sweep_at = clock() + idle_s / _SWEEPS
        self._log = RateLimitedLog(logger)
        self._links: dict[PeerKey, _Link] = {}  # the longest unused first
        self._touched: dict[PeerKey, Peer] = {}
        self._timers: Timers[PeerKey] = Timers()
        self._events: list[tuple[PeerKey, Event]] = []
        self._counters: Counter[str] = Counter()
        self._sockets = make_sockets(self.max_peers)
        self._resolver = Resolver(self._sockets.wake, lookup)
        self._asked: dict[str, set[PeerKey]] = {}
        self._closed = False

    @property
    def peers(self) -> Mapping[PeerKey, Peer]:
        """All open peers."""
        return {key: link.peer for key, link in self._links.items()}

    def peer(self, key: PeerKey) -> Peer:
        """The one peer of that key, opened if need be.

        Raises:
            TooManyPeers: there is no room, and no peer is idle.
        """
        link = self._links.get(key)
        if link is None:
            link = self._adopt(Peer(key, self._timing, changed=self._touch))
        return link.peer

    def forget(self, key: PeerKey) -> None:
        """Close the connection, if there is one; calls that wait end as ``cancelled``."""
        link = self._links.pop(key, None)
        if link is not None:
            link.peer.abandon()
            self._events += [(key, event) for event in link.peer.take_events()]
            self._touched.pop(key, None)
            self._timers.set(key, None)
            self._sockets.shut(key)
            self._counters["forgotten"] += 1

    def poll(self, timeout_s: float) -> None:
        """Send, wait for something to happen but at most ``timeout_s``, and take in what did."""
        if self._closed:
            return
        now = self._clock()
        self._take_answers(now)
        self._serve(now)
        wake_at = self._timers.next_at()
        if self._events:
            timeout_s = 0.0
        elif wake_at is not None:
            timeout_s = min(timeout_s, wake_at - now)
        self._sockets.wait(timeout_s)
        now = self._clock()
        for key, frame in self._sockets.receive():
            self._hear(key, frame, now)
        self._take_answers(now)
        for key in self._timers.take_due(now):
            self._touched[key] = self._links[key].peer
            self._links[key].peer.tick(now)
        self._serve(now)
        if now >= self._sweep_at:
            self._sweep(now)

    def next_deadline(self) -> float | None:
        """When :meth:`poll` has something to do if nothing is heard."""
        return self._clock() if self._touched or self._events else self._timers.next_at()

    def take_events(self) -> list[tuple[PeerKey, Event]]:
        """What happened since the last taking, in order."""
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Let :meth:`poll` return, now or the next time it waits. From any thread, at any time."""
        self._sockets.wake()

    def num_counted(self) -> int:
        """How much was counted since the start: counters only grow, so an equal number means equal counters."""
        return self._counters.total()

    def counters(self) -> Counter[str]:
        """What was counted since the start. From any thread."""
        return Counter(dict(self._counters))

    def stats(self) -> dict[str, float]:
        """As :meth:`counters`, and how many peers are open. From any thread."""
        return {**self.counters(), "peers": float(len(self._links))}

    def close(self) -> None:
        """Close every connection. Calls that wait end silently: there is nobody left to be told."""
        if not self._closed:
            self._closed = True
            self._links.clear()
            self._sockets.close()

    def _touch(self, peer: Peer) -> None:
        self._touched[peer.key] = peer

    def _adopt(self, peer: Peer) -> _Link:
        if len(self._links) >= self.max_peers:
            self._evict()
        link = self._links[peer.key] = _Link(peer, self._clock())
        self._counters["opened"] += 1
        return link

    def _evict(self) -> None:
        for key, link in self._links.items():
            if link.is_idle:
                self._let_go(key)
                return
        raise TooManyPeers(f"all {self.max_peers} peers are in use")

    def _let_go(self, key: PeerKey) -> None:
        self.forget(key)
        self._events.append((key, PeerForgotten()))

    def _sweep(self, now: float) -> None:
        self._sweep_at = now + self._idle_s / _SWEEPS
        for key, link in list(self._links.items()):
            if now - link.used_at < self._idle_s:
                break
            if link.is_idle:
                self._let_go(key)

    # One peer's turn

    def _serve(self, now: float) -> None:
        while self._touched:
            touched, self._touched = self._touched, {}
            for peer in touched.values():
                self._serve_peer(peer, now)

    def _serve_peer(self, peer: Peer, now: float) -> None:
        key = peer.key
        if not self._use(peer, now):
            return
        for event in peer.take_events():
            if isinstance(event, PeerDied):
                self._sockets.shut(key)
                self._log("dead", now, "producer %s is taken for dead: %s", key, _DEATHS.get(event.cause, event.cause))
            elif isinstance(event, PeerBack):
                self._log("back", now, "producer %s is back", key, level=logging.INFO)
            self._events.append((key, event))
        if peer.wants_to_send:
            if key not in self._sockets:
                self._connect(peer, now)
            if key in self._sockets:
                for request in peer.take_requests():
                    self._send(peer, request)
        self._timers.set(key, peer.next_deadline())

    def _use(self, peer: Peer, now: float) -> bool:
        """Move the peer to the end of the line of those to be forgotten. False: there is no room for it any more."""
        link = self._links.pop(peer.key, None)
        if link is None:
            try:
                link = self._adopt(peer)
            except TooManyPeers as error:
                peer.abandon()
                self._events += [(peer.key, event) for event in peer.take_events()]
                self._log("too_many_peers", now, "%s: %s", peer.key, error)
                return False
        link.used_at = now
        self._links[peer.key] = link
        return True

    def _connect(self, peer: Peer, now: float) -> None:
        host, port = peer.key.host, peer.key.port
        address = numeric_host(host)
        if not 0 < port < 1 << 16:
            self._unreachable(peer, f"port {port}", now)
        elif address is not None:
            self._open(peer, address, now)
        elif not is_host_name(host):
            self._unreachable(peer, f"host {host[:64]!r}", now)
        elif host in self._asked:
            self._asked[host].add(peer.key)
        else:
            self._asked[host] = {peer.key}
            self._resolver.ask(host)

    def _open(self, peer: Peer, address: str, now: float) -> None:
        try:
            self._sockets.open(peer.key, zmq_address(address, peer.key.port))
        except zmq.ZMQError as error:
            self._unreachable(peer, str(error), now)

    def _unreachable(self, peer: Peer, what: str, now: float) -> None:
        self._counters["unreachable"] += 1
        self._log("unreachable", now, "%s: no way to %s", str(peer.key)[:128], what)
        peer.unreachable(now)

    def _take_answers(self, now: float) -> None:
        for host, address in self._resolver.take_answers():
            for key in self._asked.pop(host):
                link = self._links.get(key)
                if link is None or not link.peer.wants_to_send:
                    continue
                if address is None:
                    self._unreachable(link.peer, f"host {host}", now)
                else:
                    self._open(link.peer, address, now)
                self._touch(link.peer)

    def _send(self, peer: Peer, request: AnyRequest) -> None:
        try:
            frame = encode(request)
        except (TypeError, ValueError, OverflowError):
            frame = b""
        if not 0 < len(frame) <= REQUEST_BYTES_MAX:
            self._counters["unsendable"] += 1
            peer.unsendable(request.seq)
        elif self._sockets.send(peer.key, frame):
            self._counters["sent"] += 1
        else:
            self._counters["dropped"] += 1

    def _hear(self, key: PeerKey, frame: bytes | None, now: float) -> None:
        peer = self._links[key].peer
        try:
            useless = peer.hear(_read(frame), now)
        except ProtocolError as error:
            useless = error.reason
            self._log("bad_reply", now, "%s: %s", key, error)
        except Exception:
            useless = "internal"
            self._log("internal", now, "%s: a reply could not be taken in", key, level=logging.ERROR, trace=True)
        self._counters["received" if useless is None else useless] += 1
        self._touch(peer)


def _read(frame: bytes | None) -> AnyReply:
    if frame is None:
        raise ProtocolError("malformed", "a message of several frames")
    return decode_reply(frame)
