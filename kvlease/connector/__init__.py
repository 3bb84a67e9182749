"""The vLLM side of kvlease: what vLLM instantiates in its scheduler process and in each of its workers.

``NixlConnector`` is the same connector under the name that some routers and parts of vLLM look for; select it with
``{"kv_connector": "NixlConnector", "kv_connector_module_path": "kvlease.connector"}``.
"""

from kvlease.connector.connector import KVLeaseConnector, NixlConnector
from kvlease.plugin import register

register()  # where vLLM was told not to load plugins, it still looks our class up by its name

__all__ = ["KVLeaseConnector", "NixlConnector"]
