"""Train models from tables and write model directories (the command `deformer-train`).

Tables are Parquet, CSV and JSON lines files, Delta Lake and Iceberg tables, and tables in memory. `trainer/X.py` fits
what `deformer_stream/model/X.py` describes.

A job prepares the table, fits the prior, trains the network, calibrates, evaluates and writes. The modules are:

    cli, settings, console     the command, its options, and its output on the terminal
    job, irregular_job         the phases of a job; of a job for irregular readings (`--irregular`)
    job_output, working_folder, checkpoint   what a job returns and stores; what an interrupted run needs to continue
    budget, planning, reading_time   the time limit: steps, preset and batch, and the time to read the table
    recipes                    the hyperparameters of model and training
    tables, prepare, data, sampling   reading a table; preparing it in three passes; its facts and the split
    value_matrix, array_files  the matrix of normalised values; arrays on disk
    slot_values, repeated_readings   several readings of one time slot: which one counts; how many are left out
    irregular_table            a table of irregular readings
    feature_choice, feature_kinds, identifiers   which columns are features, and of which kind
    feature_table, preview     how this is shown
    fill_values                values that are far from all others, such as 99999 for a missing reading
    outliers                   suspected anomalies in the table (`--contamination`)
    gaussian_prior, factor_analysis, gaussian_process   the prior of tables, of wide records and of irregular readings
    fit, batches, examples, distributed   the training loop, its batches and examples, and several processes
    global_state               random state and environment variables of a program that trains a model
    calibrate, irregular_calibration, cusum_scale   the calibration of the alert rule
    exemplars, prior_weight    what complete records are ranked with
    alert_prior, prefix_tails  the term of the Gaussian prior in the alert; lines of the terms by length of prefix
    alert_distance             training records that are stored for the alert, and whether the order of rows matters
    evaluate, irregular_evaluation, report, irregular_report, training_warnings   held-out figures, report and warnings
    finetune, per_value, per_value_tables   adapting a model (`--init-from`); a model for each type of machine (`--per`)
    faults, fault_training     names of faults from labelled records
    event_sets, equal_time, sequence_classifier   a classifier of partially ordered sequences, apart from the density
"""
