"""The running program: the pipeline, recovery after a restart, model reload, metrics and process-wide settings."""
