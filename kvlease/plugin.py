"""vLLM's plugin entry point: makes ``{"kv_connector": "KVLeaseConnector"}`` known in every process vLLM starts."""

from __future__ import annotations

from contextlib import suppress

CONNECTOR_NAME = "KVLeaseConnector"
CONNECTOR_MODULE = "kvlease.connector"


def register() -> None:
    """Register the connector with vLLM, once; vLLM calls this in each of its processes, sometimes more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # the name is registered already
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
