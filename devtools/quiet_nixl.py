"""vLLM's own NixlConnector without two habits that cost most on small machines: NIXL's spinning thread, core pinning.

Select it with `{"kv_connector": "NixlConnector", "kv_connector_module_path": "devtools.quiet_nixl"}`. It is the fairer
opponent: what is left between it and kvlease is not explained by that thread.
"""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, base_worker

__all__ = ["NixlConnector"]


class NixlConnector(NixlPullConnector):
    """The connector as shipped, built while both habits are off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _habits_off():
            super().__init__(*args, **kwargs)


@contextlib.contextmanager
def _habits_off() -> Iterator[None]:
    """Restored afterwards: other code of the process, vLLM's own thread binding included, sees the real functions."""
    agent_config, set_affinity = base_worker.nixl_agent_config, os.sched_setaffinity
    base_worker.nixl_agent_config = partial(agent_config, enable_prog_thread=False)
    os.sched_setaffinity = lambda pid, cores: None
    try:
        yield
    finally:
        base_worker.nixl_agent_config, os.sched_setaffinity = agent_config, set_affinity
