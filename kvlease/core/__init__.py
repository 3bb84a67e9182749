"""The protocol without its sockets: pure state machines that are handed messages and the time.

Nothing in here opens a socket, starts a thread, reads a clock or imports torch, vLLM or NIXL. What a class wants done
(a message sent, a read started) it returns as data, and the shells in ``kvlease.net``, ``kvlease.connector`` and
``kvlease.worker`` do it. So the same code can be run against any network and any clock, also one that a test makes up.
"""
