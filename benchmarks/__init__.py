"""Benchmarks. Each module is a program that prints its tables and one JSON line per measurement.

Figures are only comparable within one run: a benchmark measures the alternatives on the same machine in the same run.
`results` holds the outputs, and docs/explanation/results.md the figures. The programs are:

    tables, density, early, ablation, contamination, ties, drift, imputation   quality on public tables
    skab, tep, wide, attribution, faults   quality on machines and plants; explanations; names of faults
    icu, hydraulic, fleet, icu_imputation, irregular_attribution, irregular_contexts   quality on long records
    incidents, incident_guarantee, incident_feedback   quality of incidents
    equal_time, synthesizer, tie_encoders, pretrained   alternatives that were tried in experiments
    speed, training, time_limit, long_records, incident_speed   speed and memory without Kafka
    stream, recovery, model_change, incident_delivery, mqtt, sharded_replay   the whole pipeline, with its services
    capacity                   costs, and the size of an installation

The other modules are parts of them:

    command                    common options, errors, and storage of results
    early_report               the report of `early`
    prefix_statistics          other prefix statistics and rules for p-values, on the records of `early`
    irregular_records, irregular_alerts, irregular_contenders   data, rule and contenders of `icu`, `hydraulic`, `fleet`
    irregular_deformer, irregular_peers, irregular_cusums, gru_d   these contenders
    incident_detectors         detectors of many devices, for `incidents`
    feed, irregular_feed, stream_kafka, stream_local   messages that are sent, and the parts of `stream`
    capacity_costs, capacity_plan, group_members, group_simulation   the parts of `capacity`
"""

from deformer_stream.runtime.process import limit_thread_spinning

limit_thread_spinning()  # has an effect only before torch is imported
