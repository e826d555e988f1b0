"""Fast scoring of readings: compiled C code for the CPU, CUDA graphs for GPUs, and the KV caches that both use.

The C sources are in `csrc`. The modules are:

    library            loading the shared library that suits the processor
    abi, packing       structures that Python shares with C; the weights in the layout that C reads
    cpu, threads       calls of the kernels, and the threads on which they run
    prefix_distances   distances of open records to stored training records
    process_sequences  conditionals of the Gaussian process for whole sequences, for training
    kv_cache           attention keys and values of open records, in pages
    torch_kv_cache, cuda_graphs   the cache that PyTorch uses; forward passes that are captured on a GPU
"""
