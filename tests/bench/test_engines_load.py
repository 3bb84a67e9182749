"""What is asked of a pair, and what is made of its answers, with an HTTP server that plays both engines."""

from __future__ import annotations

import math

import pytest

from bench.engines_load import Stream, hand_over, handoffs_of, requests_during, worker_share
from bench.engines_pair import CONTENDERS
from tests.bench.stub import BYTES_PER_PULL, StubServer

OURS, SHIPPED, _ = CONTENDERS
PROMPT = [1, 2, 3]


def test_a_handover_takes_as_long_as_the_consumer_does() -> None:
    with StubServer(pull_s=0.05) as server:
        sample = hand_over(server.pair(OURS), PROMPT)
    assert sample.handover_s >= 0.05
    assert sample.same_token
    assert sample.error == ""


def test_a_refused_handover_is_no_sample() -> None:
    with StubServer() as server:
        server.refuse_handoffs = True
        sample = hand_over(server.pair(OURS), PROMPT)
    assert math.isnan(sample.handover_s)
    assert "500" in sample.error


@pytest.mark.parametrize("contender", [OURS, SHIPPED], ids=lambda contender: contender.slug)
def test_pulls_are_counted_by_the_metrics_of_either_connector(contender) -> None:
    with StubServer() as server:
        pair = server.pair(contender)
        hand_over(pair, PROMPT)
        before = pair.counted()
        hand_over(pair, PROMPT)
        hand_over(pair, PROMPT)
        counted = pair.counted().since(before)
    assert (counted.pulls, counted.failed, counted.bytes_pulled) == (2, 0, 2 * BYTES_PER_PULL)


def test_failed_loads_are_counted_with_their_cause() -> None:
    with StubServer() as server:
        pair = server.pair(OURS)
        before = pair.counted()
        server.refuse_handoffs = True
        hand_over(pair, PROMPT)
        counted = pair.counted().since(before)
    assert (counted.pulls, counted.failed, counted.causes) == (0, 1, {"peer_dead": 1})


def test_a_stream_runs_beside_pulls_and_ends_when_the_client_hangs_up() -> None:
    with StubServer() as server:
        pair = server.pair(OURS)
        with Stream(pair.consumer, PROMPT).running(first_tokens=5) as stream:
            seen = len(stream.token_times_s)
            pulls = requests_during(stream, PROMPT, handoffs_of(pair, PROMPT, 3), every_s=0.02)
            stream.wait_for(seen + 5)
        assert server.hung_up.wait(10)
    assert seen >= 5
    assert [pull.error for pull in pulls] == ["", "", ""]
    assert pulls[1].sent_at_s >= pulls[0].sent_at_s + 0.02 - 0.005
    assert stream.gaps_s(0, math.inf)


def test_gaps_are_those_that_touch_the_window() -> None:
    with StubServer() as server:
        stream = Stream(server.pair(OURS).consumer, PROMPT)
    stream.token_times_s = [1.0, 2.0, 4.0, 7.0, 11.0]
    assert stream.gaps_s(0, 99) == [1, 2, 3, 4]
    assert stream.gaps_s(2.5, 3.5) == [2]
    assert stream.gaps_s(3.0, 8.0) == [2, 3, 4]
    assert stream.gaps_s(20, 30) == []


def test_a_pair_is_awake_only_inside() -> None:
    with StubServer() as server:
        pair = server.pair(OURS)
        with pair.awake():
            assert [engine.calls for engine in pair.engines] == [["thaw"], ["thaw"]]
        assert [engine.calls for engine in pair.engines] == [["thaw", "freeze"], ["thaw", "freeze"]]


def test_the_busiest_worker_counts_and_other_processes_do_not() -> None:
    shares = {"producer/VLLM::Worker[2]": 0.01, "consumer/VLLM::Worker[5]": 0.02, "consumer/VLLM::EngineCore[4]": 0.9}
    assert worker_share(shares) == 0.02
