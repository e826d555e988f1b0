"""Consumers that are killed, moved and cut off from their brokers, and must say what one left in peace says.

`python -m tests.chaos --size full` (`make chaos`), `--size small` (`make chaos CHAOS=small`, and part of the tests).
"""
