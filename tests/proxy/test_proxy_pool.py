"""Round robin and back-off, with time as an argument."""

from __future__ import annotations

from pool import Pool


def picks(pool: Pool, now: float, count: int) -> str:
    return "".join(engine.url for _ in range(count) if (engine := pool.pick(now)) is not None)


def test_live_engines_take_turns() -> None:
    assert picks(Pool("producer", ["a", "b", "c"]), 0.0, 7) == "abcabca"


def test_a_failed_engine_is_passed_over_and_its_share_is_spread() -> None:
    pool = Pool("producer", ["a", "b", "c"])
    pool.engines[0].failed("cannot be reached", 0.0)
    assert picks(pool, 0.4, 4) in ("bcbc", "cbcb")
    assert "a" in picks(pool, 0.5, 3)


def test_the_back_off_doubles_to_ten_seconds_and_one_answer_ends_it() -> None:
    (engine,) = Pool("consumer", ["a"]).engines
    now, waits = 0.0, []
    for _ in range(7):
        engine.failed("x", now)
        waits.append(engine.down_until_s - now)
        now = engine.down_until_s
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]

    engine.answered()
    assert engine.is_live(now)
    engine.failed("x", now)
    assert engine.down_until_s == now + 0.5


def test_calls_that_fail_together_count_once() -> None:
    (engine,) = Pool("consumer", ["a"]).engines
    for _ in range(50):
        engine.failed("x", 0.0)
    assert engine.down_until_s == 0.5


def test_nobody_left() -> None:
    pool = Pool("producer", ["a", "b"])
    first = pool.pick(0.0)
    second = pool.pick(0.0, {first} if first else ())
    assert first is not None
    assert second is not None
    assert first is not second
    assert pool.pick(0.0, {first, second}) is None
    assert pool.is_live(0.0)

    first.failed("cannot be reached", 0.0)
    second.failed("answered 500", 0.0)
    assert pool.pick(0.0) is None
    assert not pool.is_live(0.0)
    assert pool.why_down() == "a cannot be reached; b answered 500"
    assert pool.state(0.0) == {"a": "down: cannot be reached", "b": "down: answered 500"}
    assert Pool("producer", []).why_down() == "there is no producer"
