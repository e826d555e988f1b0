"""Each benchmark prints its table and one JSON line a row; figures are ratios measured in one run."""

from deformer_stream.cli_utils import calm_threads

calm_threads()  # before torch is imported
