"""Benchmarks. Each module is a program that prints its tables and one JSON line per measurement.

Figures are only comparable within one run: a benchmark measures the alternatives on the same machine in the same run.
"""

from deformer_stream.runtime.process import limit_thread_spinning

limit_thread_spinning()  # has an effect only before torch is imported
