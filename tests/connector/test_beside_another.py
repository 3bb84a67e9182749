"""Under vLLM's ``MultiConnector``, beside another connector that loads, too: each speaks for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorWorkerMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvlease.connector.connector import KVLeaseConnector
from kvlease.core.orders import Orders
from tests.connector.harness import PATIENCE_S, Site, prompt

if TYPE_CHECKING:
    MakeSite = Callable[..., "Site"]

OURS = {
    "kv_connector": "KVLeaseConnector",
    "kv_connector_module_path": "kvlease.connector",
    "kv_role": "kv_consumer",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host": "127.0.0.1", "port": 0, "acquire_timeout_s": PATIENCE_S / 2},
}
OTHER = {"kv_connector": "OtherConnector", "kv_role": "kv_consumer"}


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that has what it is told to have."""

    has: dict[str, int]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.has = {}

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def update_state_after_alloc(self, *args: Any) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens = self.has.get(request.request_id, 0) - num_computed_tokens
        return max(num_tokens, 0), num_tokens > 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return (0,)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


KVConnectorFactory._registry["OtherConnector"] = lambda: OtherConnector


class MultiSite(Site):
    """An engine with both; ``says_received`` is what the other's workers report with the next step."""

    index: int
    says_received: set[str]

    def __init__(self, model: Path, children: list[dict[str, Any]]) -> None:
        self.index, self.says_received = children.index(OURS), set()
        transfer = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )
        super().__init__(model, "kv_consumer", engine={"kv_transfer_config": transfer})

    def ours(self, connector: Any) -> KVLeaseConnector:
        assert isinstance(connector, MultiConnector)
        self.other = connector.sub_connectors[1 - self.index]
        return super().ours(connector.sub_connectors[self.index])

    def orders_in(self, metadata: Any) -> Orders:
        return super().orders_in(metadata.metadata[self.index])

    def workers_output(self) -> KVConnectorOutput:
        output = super().workers_output()
        both = [None, None]
        both[self.index] = output.kv_connector_worker_meta
        output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(metadata=tuple(both))
        output.finished_recving = {*(output.finished_recving or ()), *self.says_received}
        self.says_received = set()
        return output

    def count(self, samples: dict[str, Any]) -> None:
        super().count(samples.get("KVLeaseConnector", {}))

    def status(self, name: str) -> RequestStatus:
        return self.scheduler.requests[name].status


@pytest.fixture
def make_multi(tiny_model: Path) -> Iterator[Callable[[list[dict[str, Any]]], MultiSite]]:
    made: list[MultiSite] = []

    def make(children: list[dict[str, Any]]) -> MultiSite:
        made.append(MultiSite(tiny_model, children))
        return made[-1]

    yield make
    for site in made:
        site.close()


@pytest.mark.parametrize("children", [[OTHER, OURS], [OURS, OTHER]], ids=["other first", "ours first"])
def test_the_first_one_that_has_it_loads_and_a_lease_that_is_not_needed_is_given_back(
    make_site: MakeSite, make_multi: Callable[..., MultiSite], children: list[dict[str, Any]]
) -> None:
    producer, consumer = make_site("kv_producer"), make_multi(children)
    tokens = prompt(40)
    free = producer.blocks_free
    consumer.other.has["d"] = 32
    consumer.submit("d", tokens, producer.prefill("p", tokens))
    if children[0] is OURS:
        consumer.until(lambda: "d" in consumer.worker.loads)
        consumer.worker.reports.received.add("d")
    else:
        consumer.until(lambda: consumer.status("d") is RequestStatus.WAITING_FOR_REMOTE_KVS)
        producer.until(lambda: producer.blocks_free == free)
        assert consumer.worker.loads == {}
        consumer.says_received.add("d")
    consumer.until(lambda: "d" in consumer.finished)


def test_what_the_other_says_of_our_load_is_not_believed_and_the_blocks_stay(
    make_site: MakeSite, make_multi: Callable[..., MultiSite]
) -> None:
    producer, consumer = make_site("kv_producer"), make_multi([OURS, OTHER])
    tokens = prompt(40)
    free = consumer.blocks_free
    for name in ("d", "left"):
        consumer.submit(name, tokens, producer.prefill(f"p-{name}", tokens))
    consumer.until(lambda: len(consumer.worker.loads) == 2)
    consumer.abort("left")
    consumer.says_received.update({"d", "left"})
    consumer.step()
    assert consumer.status("d") is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert consumer.blocks_free == free - 6, "both are still being read into"
    consumer.worker.reports.received.update({"d", "left"})
    consumer.step()
    consumer.says_received.clear()
    consumer.until(lambda: "d" in consumer.finished and consumer.blocks_free == free)
