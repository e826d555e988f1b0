"""Run `deformer-stream` as `python -m deformer_stream.cli`."""

from deformer_stream.cli.main import main

main()
