"""How many messages a poll requests: limited by their number, their bytes, and the time that they take to process."""

from __future__ import annotations

from connectors.kafka.client import FIRST_POLL_MESSAGES, POLL_BYTES, USUAL_POLL_MESSAGES, PollSize

LARGE = 4 * USUAL_POLL_MESSAGES
SMALL_BYTES = 10


class Polls:
    """Polls whose messages take a given time to process, on a clock of their own."""

    def __init__(self, limit: int) -> None:
        self.time = 0.0
        self.size = PollSize(limit, lambda: self.time)

    def take(self, seconds_per_message: float, available: int = 10**6, message_bytes: int = SMALL_BYTES) -> int:
        """Return how many messages a poll requests; it returns as many as are available, which are then processed."""
        requested = self.size.choose()
        returned = min(requested, available)
        self.size.observe(returned, returned * message_bytes)
        self.time += returned * seconds_per_message
        return requested


def test_the_first_poll_is_small_and_later_ones_reach_the_limit() -> None:
    polls = Polls(100_000)
    assert [polls.take(0.0) for _ in range(3)] == [FIRST_POLL_MESSAGES, 100_000, 100_000]
    assert Polls(5).take(0.0) == 5


def test_large_messages_make_polls_smaller_and_a_larger_limit_permits_more_bytes() -> None:
    usual, large = Polls(USUAL_POLL_MESSAGES), Polls(LARGE)
    for polls, max_bytes in ((usual, POLL_BYTES), (large, 4 * POLL_BYTES)):
        polls.take(0.0, message_bytes=50_000)
        assert polls.take(0.0, message_bytes=10 * max_bytes) == max_bytes // 50_000
        assert polls.take(0.0) == 1  # a message that is larger than all of it is read by itself


def test_a_small_limit_does_not_reduce_the_bytes_of_a_poll() -> None:
    polls = Polls(100)
    polls.take(0.0, message_bytes=POLL_BYTES // 80)
    assert polls.take(0.0) == 80


def test_a_poll_beyond_the_usual_size_is_processed_within_a_second() -> None:
    polls = Polls(LARGE)
    seconds_per_message = 1 / (2 * USUAL_POLL_MESSAGES)  # twice the usual number in a second
    sizes = [polls.take(seconds_per_message) for _ in range(5)]
    assert sizes[0] == FIRST_POLL_MESSAGES
    assert all(abs(size - 2 * USUAL_POLL_MESSAGES) <= 1 for size in sizes[2:])
    assert [polls.take(10 * seconds_per_message) for _ in range(3)][1:] == [USUAL_POLL_MESSAGES] * 2
    polls.take(0.0)
    assert polls.take(0.0) == LARGE  # as soon as they are fast again


def test_large_slow_messages_do_not_make_polls_of_several_models_longer() -> None:
    sizes_by_limit = {}
    for limit in (USUAL_POLL_MESSAGES, LARGE):
        polls = Polls(limit)
        sizes_by_limit[limit] = [polls.take(0.05, message_bytes=100_000) for _ in range(4)]
    assert sizes_by_limit[USUAL_POLL_MESSAGES][1:] == [POLL_BYTES // 100_000] * 3
    assert sizes_by_limit[LARGE][2:] == [20, 20]  # as many as take a second
    slower = Polls(LARGE)
    assert [slower.take(1.0, message_bytes=100_000) for _ in range(4)][2:] == [POLL_BYTES // 100_000] * 2


def test_polls_of_the_usual_size_do_not_depend_on_time() -> None:
    polls = Polls(USUAL_POLL_MESSAGES)
    polls.take(0.0)
    assert [polls.take(1.0) for _ in range(3)] == [USUAL_POLL_MESSAGES] * 3


def test_polls_without_messages_change_nothing() -> None:
    polls = Polls(LARGE)
    seconds_per_message = 1 / (2 * USUAL_POLL_MESSAGES)
    for _ in range(3):
        polls.take(seconds_per_message)
    before = polls.take(seconds_per_message, available=0)
    polls.time += 60.0  # waiting for messages is no work
    assert polls.take(seconds_per_message) == before
