"""Runs in shards: `replay --output-dir`, and `calibrate --workers`.

run      divide the input, score the shards by several processes, and continue an interrupted run
tasks    what a worker process does: partition a part of the input, score a shard
replay   the command: merge the evidence and the totals of the shards
"""
