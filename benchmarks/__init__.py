"""Each benchmark prints its table and one JSON line a row; figures are ratios measured in one run."""

from deformer_stream.cli_utils import limit_thread_spinning

limit_thread_spinning()  # before torch is imported
