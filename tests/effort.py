"""How many examples and disturbances tests try. `make test-long` tries all of them, every other target fewer."""

from __future__ import annotations

import os

IS_LONG = "DEFORMER_TEST_LONG" in os.environ
"""Whether tests try everything, as `make test-long` does, which takes about an hour."""

SHARE = 4
"""Of how many examples a short run tries one."""

MIN_EXAMPLES = 5


def num_examples(in_long_run: int) -> int:
    """Return the number of examples of a property whose examples are costly, such as those with a network.

    Args:
        in_long_run: The number in a long run.
    """
    return in_long_run if IS_LONG else min(in_long_run, max(MIN_EXAMPLES, in_long_run // SHARE))
