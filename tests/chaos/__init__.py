"""A test in which consumers are killed, moved and disconnected while events arrive.

Their alerts must equal those of one uninterrupted consumer. Run it with `make chaos`, or with `make chaos CHAOS=small`
or `CHAOS=tiny` for short runs, which are also part of the tests.
"""
