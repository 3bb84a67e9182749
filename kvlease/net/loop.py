"""What the endpoint's thread does: own the lease table, and answer every consumer.

One turn of its loop::

    sleep until a message, an order or the next deadline
      -> now = the clock                            (kept while the inbox has not been emptied)
      -> for each of at most 256 messages:          first the orders, so that none overtakes its grant; then answer it
      -> inbox empty, or full for too long:         expire what was due at ``now``

So an expiry never beats a message that lay in the inbox, and a flood of messages cannot stop expiry. Nothing that a
peer sends can stop the loop; should a bug of ours do it, every lease ends as revoked, and grants are refused.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kvlease.core.checksums import leased_blocks_at
from kvlease.core.digest import prompt_digest
from kvlease.core.greeting import answer_hello
from kvlease.core.ids import Incarnation
from kvlease.core.leases import Grant, LeaseTable, LeaseTiming
from kvlease.core.messages import (
    AnyReply,
    Checksum,
    Checksums,
    Count,
    Gone,
    Hello,
    Invalid,
    Ping,
    Pong,
    ProtocolError,
    Welcome,
    decode_request,
    encode,
)
from kvlease.core.runs import block_runs
from kvlease.logs import RateLimitedLog
from kvlease.net.hashing import Asked, Hashers, HashReply
from kvlease.net.ledger import AskHashers, GrantItem, Ledger, RevokeAll, Snapshot, Watch
from kvlease.net.lifeline import is_severed
from kvlease.net.router import Router, peer_address

BATCH_MESSAGES: Final = 256
"""How many messages are answered before expiry and closing get their turn."""

FLOOD_PATIENCE_S: Final = 0.5
"""How long a full inbox is worked on before what was due at its beginning expires: a flood delays an expiry by at most
twice that."""

logger = logging.getLogger("kvlease.endpoint")


class _Envelope(msgspec.Struct):
    """What is needed of a bad request to answer it."""

    seq: Count


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)


def _seq_of(payload: bytes) -> int | None:
    try:
        return _envelope_decoder.decode(payload).seq
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _check_frames(frames: Sequence[object]) -> None:
    if len(frames) != 2:
        raise ProtocolError("malformed", f"{len(frames) - 1} frames instead of one")


class Loop:
    """The endpoint's thread, from :meth:`run` on; nothing in here is touched by another one.

    ``table`` is to be read by whoever drives the loop, and changed by nobody.
    """

    def __init__(
        self,
        router: Router,
        ledger: Ledger,
        incarnation: Incarnation,
        timing: LeaseTiming,
        clock: Callable[[], float],
    ) -> None:
        self._router = router
        self._ledger = ledger
        self.table = LeaseTable(incarnation, timing)
        self._counters: Counter[str] = Counter()
        self._clock = clock
        self._hashers = Hashers()
        self._lifelines: dict[int, socket.socket] = {}
        self._severed = False
        self._backlog_since: float | None = None
        self._log = RateLimitedLog(logger)
        self._publish()

    def run(self) -> None:
        """Answer until the endpoint is closed; then, and if all breaks, end every lease."""
        try:
            while not self._ledger.is_closing:
                self.turn()
        except Exception:
            logger.critical("the endpoint has stopped: all leases are revoked, no more are granted", exc_info=True)
        finally:
            self.finish()

    def turn(self) -> None:
        """Sleep, answer, expire: one turn of :meth:`run`, for whoever drives the loop without a thread."""
        for fd in self._router.poll(self.sleep_s()):
            if fd in self._lifelines and is_severed(self._lifelines[fd]):
                self._sever()
        now = self._clock() if self._backlog_since is None else self._backlog_since
        self._backlog_since = now
        for asked, found in self._hashers.take():
            self._tell_checksums(asked, found)
        is_empty = self._answer_batch()
        if is_empty or self._clock() >= now + FLOOD_PATIENCE_S:
            self._backlog_since = None
            self.table.expire(now)
            self._publish()

    def sleep_s(self) -> float | None:
        """For how long there is nothing to do if nothing is heard; None: for ever."""
        if self._backlog_since is not None:
            return 0.0
        deadline = self.table.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def _answer_batch(self) -> bool:
        """Answer what is in the inbox, but not for ever. Whether it is empty now."""
        for _ in range(BATCH_MESSAGES):
            frames = self._router.try_receive()
            self._obey_orders()
            if frames is None:
                return True
            self._answer(frames)
        return False

    # Messages

    def _answer(self, frames: list[Any]) -> None:
        now = self._clock()
        payload = frames[-1].bytes
        try:
            _check_frames(frames)
            reply = self._reply_to(payload, frames[0].bytes, now)
            answer = encode(reply) if reply is not None else b""
        except ProtocolError as error:
            self._log(error.reason, now, "a message from %s: %s", peer_address(frames), str(error)[:200])
            answer = self._invalid(payload, error.reason, str(error)[:200])
        except Exception:
            self._log("internal", now, "a message could not be handled", level=logging.ERROR, trace=True)
            answer = self._invalid(payload, "internal", "the producer could not handle this")
        self._publish()
        if answer and not self._router.send(frames[0].bytes, answer):
            self._counters["replies_dropped"] += 1

    def _reply_to(self, payload: bytes, sender: bytes, now: float) -> AnyReply | None:
        """The answer to one message; None when it comes later."""
        request = decode_request(payload)
        match request:
            case Ping():
                self._counters["pings"] += 1
                return Pong(seq=request.seq, incarnation=self.table.incarnation)
            case Hello():
                reply = answer_hello(request, self.table.incarnation, self._ledger.site)
                self._counters["welcomed" if isinstance(reply, Welcome) else "refused_hello"] += 1
                return reply
            case Checksum():
                return self._ask_hashers(request, sender, now)
        return self.table.handle(request, now)

    def _ask_hashers(self, request: Checksum, sender: bytes, now: float) -> Gone | None:
        grant = self.table.readable(request, now)
        if isinstance(grant, Gone):
            return grant
        blocks = leased_blocks_at(request.positions, grant.blocks, grant.is_settled)
        self._hashers.ask(Asked(sender, request, grant.is_settled), blocks)
        return None

    def _tell_checksums(self, asked: Asked, found: HashReply) -> None:
        """Pass a worker's answer on. Only while the lease is live are those the checksums of what it lends."""
        request = asked.request
        gone = self.table.readable(request, self._clock())
        reply: AnyReply
        if isinstance(gone, Gone):
            reply = gone
        elif found.error is not None:
            self._counters["invalid_no_checksums"] += 1
            reply = Invalid(
                seq=request.seq, incarnation=self.table.incarnation, reason="no_checksums", text=found.error[:200]
            )
        else:
            self._counters["checksums"] += 1
            reply = Checksums(
                seq=request.seq, incarnation=self.table.incarnation, sums=found.sums, is_whole=asked.is_whole
            )
        if not self._router.send(asked.sender, encode(reply)):
            self._counters["replies_dropped"] += 1

    def _invalid(self, payload: bytes, reason: str, text: str) -> bytes:
        """The answer to a request that cannot be honoured; nothing, if it does not even have a number."""
        self._counters[f"invalid_{reason}"] += 1
        seq = _seq_of(payload)
        if seq is None:
            return b""
        return encode(Invalid(seq=seq, incarnation=self.table.incarnation, reason=reason, text=text))

    # Orders

    def _obey_orders(self) -> None:
        while (order := self._ledger.next_order()) is not None:
            match order:
                case GrantItem():
                    self._grant(order)
                case RevokeAll():
                    self.table.revoke_all(self._clock())
                case Watch():
                    self._lifelines[order.lifeline.fileno()] = order.lifeline
                    self._router.watch(order.lifeline.fileno())
                    if self._severed:
                        self._hang_up()
                case AskHashers():
                    self._hashers.connect(self._router, order.addresses)

    def _grant(self, item: GrantItem) -> None:
        try:
            digest = prompt_digest(item.token_ids, item.num_tokens, item.lora, item.cache_salt, item.mm_hashes)
            blocks = [block_runs(group) for group in item.block_ids]
            grant = Grant(item.lease, item.token, digest, item.num_tokens, blocks, item.is_settled)
            self.table.grant(grant, self._clock())
        except Exception:
            self._counters["grants_failed"] += 1
            self._log("grant", self._clock(), "no lease for %s: revoked", item.lease, level=logging.ERROR, trace=True)
            self._ledger.report_revoked(item.lease)

    # Endings

    def _publish(self) -> None:
        """Let other threads see what ended, and the numbers of this moment."""
        self._ledger.report(self.table.take_ended())
        table, now = self.table, self._clock()
        gauges = {
            "leases_live": float(len(table)),
            "tombstones": float(table.num_tombstones),
            "channels": float(table.num_channels),
        }
        oldest_granted_at = now - table.oldest_grant(now) if len(table) else None
        self._ledger.snapshot = Snapshot(
            {**table.counters, **self._counters, **self._hashers.counters}, gauges, oldest_granted_at
        )

    def _sever(self) -> None:
        """A worker's pages are going away: end everything, grant nothing more, and only then let the worker go on."""
        if not self._severed:
            self._severed = True
            logger.warning("a worker of this engine is shutting down or dead: all leases are revoked for good")
        self._ledger.shut("a worker of this engine has shut down or died")
        self._obey_orders()
        self.table.revoke_all(self._clock())
        self._publish()
        self._hang_up()

    def _hang_up(self) -> None:
        for fd, lifeline in self._lifelines.items():
            self._router.unwatch(fd)
            lifeline.close()
        self._lifelines.clear()

    def finish(self) -> None:
        """Answer nothing from here on, report every lease as over, and only then let the workers go."""
        self._ledger.shut("the endpoint has stopped")
        try:
            self.table.revoke_all(self._clock())
            self._publish()
        finally:  # even if the table is what broke
            self._ledger.report_all_revoked()
            self._router.close()
            self._ledger.drop_orders()
            for lifeline in self._lifelines.values():
                lifeline.close()
