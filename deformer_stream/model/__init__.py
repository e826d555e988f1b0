"""The density model of records: features, the network and its Gaussian prior.

The network exists twice: in PyTorch, which trains and is the reference, and as NumPy arrays (`parameters`), which the
compiled kernels read. The modules are:

    schema, windows, time_slots, reading_times   the features of a record, and how a record relates to time
    config, constants    hyperparameters; constants that PyTorch and the kernels share
    parameters           a model as NumPy arrays
    load_network         the network of such a model, if PyTorch is installed

    deformer             the network in PyTorch
    layers, attention, time_inputs   its parts
    distributions        the conditionals of readings, in PyTorch
    conditional_arrays   the same as NumPy arrays
    score_terms          the numbers of a reading from which scores are computed, as rows of an array
    bounded_context      the earlier readings on which a reading of a long record is conditional

    gaussian_prior, mixture                        the prior as a mixture of Gaussians: in PyTorch, as NumPy arrays
    gaussian_process, process_conditionals         the prior as a Gaussian process
    ranking, exemplars   the ranking of complete records: in PyTorch, as NumPy arrays
    positions            the numbers by which readings are compared in distances
    marginal_density     the density of single readings, a term of the ranking
    alert_prior          p-values of readings under the Gaussian prior alone, a term of the alert
    prefix_lines         terms of the alert that are straight lines in a number of a prefix
    alert_distance       the distance of an open record to stored training records, a term of the alert
    gamma, cycles        functions of numbers
"""
