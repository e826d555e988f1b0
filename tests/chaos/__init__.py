"""A test in which consumers are killed, moved and disconnected while events arrive.

Their alerts must equal those of one uninterrupted consumer. Run it with `make chaos`, or with `make chaos CHAOS=small`
for a short run, which is also part of the tests.
"""
