"""Fast scoring of readings: compiled C code for the CPU, CUDA graphs for GPUs, and the KV caches that both use."""
