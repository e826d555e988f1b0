"""The library: its objects and functions. `deformer_stream.api` offers the public ones."""
