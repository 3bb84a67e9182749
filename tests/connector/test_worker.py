"""What two engines must agree on before one reads the other's pages, taken from vLLM's real configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm")

import torch

from kvlease.config import Settings
from kvlease.connector.worker import WorkerFacade, compat_factors
from kvlease.core.compat import differences
from kvlease.core.orders import Orders, Reports
from kvlease.worker.regions import LayerSpec, find_regions

if TYPE_CHECKING:
    from tests.connector.harness import Site

MakeSite = Callable[..., "Site"]
PAGES = 8


def factors(config: Any, spec: Any) -> dict[str, str]:
    caches = {"layer.0": torch.zeros((2, PAGES, spec.block_size, 2, 32), dtype=spec.dtype)}
    layers = {"layer.0": LayerSpec(group=0, num_pages=PAGES, page_bytes=spec.page_size_bytes)}
    return compat_factors(config, spec, caches, find_regions(caches, layers).regions)


def named(site: Site, change: Callable[[Any], None]) -> list[str]:
    """The factors in which an engine differs from one like it but for ``change``."""
    spec = site.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    config = copy.copy(site.config)
    config.model_config = copy.copy(config.model_config)
    config.model_config.hf_text_config = copy.deepcopy(config.model_config.hf_text_config)
    config.parallel_config = copy.copy(config.parallel_config)
    change(config)
    return [one.name for one in differences(factors(site.config, spec), factors(config, spec))]


def test_one_model_under_two_paths_is_one_model(make_site: MakeSite) -> None:
    def move(config: Any) -> None:
        config.model_config.model = "/somewhere/else"
        config.model_config.hf_text_config._name_or_path = "/somewhere/else"

    assert named(make_site("kv_consumer"), move) == []


CHANGES: list[tuple[str, Callable[[Any], None]]] = [
    ("model_config", lambda config: setattr(config.model_config.hf_text_config, "rope_theta", 1.0)),
    ("model_config", lambda config: setattr(config.model_config.hf_text_config, "num_hidden_layers", 3)),
    ("model_config", lambda config: setattr(config.model_config.hf_text_config, "rms_norm_eps", 0.1)),
    ("model_dtype", lambda config: setattr(config.model_config, "dtype", torch.float16)),
    ("quantization", lambda config: setattr(config.model_config, "quantization", "awq")),
    ("tp_size", lambda config: setattr(config.parallel_config, "tensor_parallel_size", 2)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_what_changes_the_content_of_pages_is_named(
    make_site: MakeSite, name: str, change: Callable[[Any], None]
) -> None:
    assert named(make_site("kv_consumer"), change) == [name]


def test_another_block_size_is_named_with_what_follows_from_it(make_site: MakeSite, tmp_path: Path) -> None:
    site = make_site("kv_consumer")
    spec = site.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec
    differing = differences(factors(site.config, spec), factors(site.config, spec.copy_with_new_block_size(32)))
    assert [one.name for one in differing] == ["block_size", "kv_layout", "page_bytes"]


class Half:
    """Stands where the worker half without vLLM stands."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def take_orders(self, orders: Orders) -> None:
        self.calls.append("orders")

    def rest(self) -> None:
        self.calls.append("rest")

    def take_reports(self) -> Reports:
        self.calls.append("reports")
        return Reports()


def test_a_step_that_may_rest_rests_once_before_its_reports_are_taken() -> None:
    facade, half = WorkerFacade(None, None, Settings()), Half()
    facade._half = half  # type: ignore[assignment]
    facade.take_orders(Orders(may_rest=True))
    for _ in range(2):
        facade.take_results()
    facade.take_orders(Orders())
    facade.take_results()
    assert half.calls == ["orders", "rest", "reports", "reports", "orders", "reports"]
