"""The map of vLLM's hooks, where it is more than a name: when orders reach the transfer thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole

from kvlease.connector import connector as module
from kvlease.connector.connector import KVLeaseConnector
from kvlease.connector.metadata import KVLeaseMetadata
from kvlease.core.orders import Orders
from tests.connector.harness import engine_config, kv_cache_config


class Listening:
    """Stands where a worker half stands."""

    def __init__(self, *args: Any) -> None:
        self.heard: list[Orders] = []

    def take_orders(self, orders: Orders) -> None:
        self.heard.append(orders)

    def shutdown(self) -> None:
        pass


def test_orders_are_queued_once_and_before_the_model_runs(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = Listening()
    monkeypatch.setattr(module, "WorkerFacade", lambda *args: half)
    connector = KVLeaseConnector(
        engine_config(tiny_model, "kv_consumer"), KVConnectorRole.WORKER, kv_cache_config(num_blocks=8)
    )
    orders = Orders(leases_live=3)
    connector.bind_connector_metadata(KVLeaseMetadata(orders))
    assert half.heard == [orders]
    assert connector.has_connector_metadata()
    connector.start_load_kv(None)
    connector.clear_connector_metadata()
    assert half.heard == [orders]
    connector.bind_connector_metadata(KVConnectorMetadata())  # of somebody else
    assert half.heard == [orders]
    connector.shutdown()
