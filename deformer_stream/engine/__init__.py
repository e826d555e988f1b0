"""The engine: it turns batches of events into scores, alerts and closed records, and reads no clock and no file.

Begin with `engine`, whose method `handle` is the third stage of the pipeline, and with `events`, the types that it
takes and returns. The modules are:

    events               the types that enter and leave the engine
    engine, engine_set   the state machine for one model; several of them that share limits
    model_versions       the models that score open records at the same time, and their KV caches
    closing, closed_records   which records are closed, and when; their final scores and the evidence of drift

    records              the table of open records
    ingest, partition    which events are accepted; the open and closed records of a partition of the input
    reading_log          the readings of open records
    id_set, idle_queue, watermarks    ids of closed records; the longest idle records; windows that are over
    slot_readings, slot_ingest        readings that are combined with others of their time slot
    irregular_ingest, record_contexts, last_context   irregular readings, and the readings to which each is compared
    ties                 readings of one event time, which are scored together
    snapshot, snapshot_adaptation     the state of a partition as a value; its form for another model
    rescoring            scoring open records again after a change of the model or a restore

    scoring              scores of readings, by the compiled kernels
    torch_scorer         the same by PyTorch, on GPUs and without kernels
    running_statistics   the inputs of cumulative sums, and the update of the statistics of records in NumPy
    passes               the readings of one pass through the network
    record_scores        scores of complete records

    alerts               alerts of the scored readings of a batch
    explain, explain_contexts   which readings explain an alert; the same for irregular readings
    findings             what explanations compute about readings
    conditionals, torch_conditionals, order_trees   the distributions that explanations need, in many orders
    fault_inputs         the inputs of the classifier of faults
    suspicious           suspicious records without an alert
    next_reading, next_reading_ranking   the reading to take next, and how it is found

    imputation, irregular_imputation        missing readings, and random records
    estimates            single values from distributions
    single_readings      the check that readings are not irregular
"""
