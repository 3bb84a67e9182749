"""The vLLM side of kvlease: what vLLM instantiates in its scheduler process and in each of its workers.

``NixlConnector`` is the same connector under the name that some routers and parts of vLLM look for; select it with
``{"kv_connector": "NixlConnector", "kv_connector_module_path": "kvlease.connector"}``.

vLLM itself is imported when one of the two is asked for: what follows requests, leases and loads in here needs none of
it, and is simulated without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlease.connector.connector import KVLeaseConnector, NixlConnector

__all__ = ["KVLeaseConnector", "NixlConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvlease.connector import connector
    from kvlease.plugin import register

    register()  # where vLLM was told not to load plugins, it still looks our class up by its name
    return getattr(connector, name)
