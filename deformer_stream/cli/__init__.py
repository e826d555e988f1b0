"""The commands of `deformer-stream`. `main` lists all of them.

The module `stream` has consume and replay, `tables` has produce, impute and sample, and `inspection` has inspect and
config. Each of `bridge`, `calibrate`, `completion`, `dead_letters`, `feedback`, `incidents`, `init`, `propose` and
`serve` has the command of its name. The other modules are parts of commands:

    served_models        models, their engines and their reload
    codecs, registry_clients   codecs, and the schemas and formats of a registry
    input_files, file_runs     sources of files, and runs of the pipeline on them
    shards               runs in shards
    calibration_records, record_collector, seen_records, calibration_review, recalibration_report   parts of calibrate
    incident_files, incident_delivery, proposal_report   parts of replay, incidents and propose
    kafka_cluster, consume_topics, mqtt  connections
    examples, config_report, model_summary, label_report       texts
"""
