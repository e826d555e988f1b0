"""The running program: loops, recovery after a restart, model reload, metrics and process-wide settings.

The modules are:

    ports                the protocols of sources, sinks and clocks
    pipeline, pipeline_report         the loop that scores events; its totals, logs and metrics
    recovery, reload, timing          restored partitions; new models; clocks and the schedule of commits
    alert_rate, alert_share, repeated_readings   limits and warnings
    record_labels, label_outcomes     labels of records in files; how many records of each label have alerted
    metrics, process_metrics, group_metrics, source_status, http_server   metrics and health
    process              memory, threads and garbage collection of the process
    shard_job            the plan and the manifest of a run in shards
    worker_pool, ray_tasks            tasks on several processes or machines
    calibration_sink, next_reading_order         the records of a new calibration
    plant_source, bridge, bridge_metrics         systems without a log, such as MQTT

    incident_pipeline, tracker_set, detection_metrics   the loop that makes incidents of evidence
    late_evidence        the warning that much of the evidence is out of order
    incident_plan        the rule and the options by which incidents are made
    incident_sink, memory_logs, existing_messages       incidents in one process; logs in memory; what a log holds
    incident_ports, notification, notification_backlog, incident_metrics   the delivery of incidents to receivers
    incident_calibration, propose, incident_difference, approval   a new calibration of incidents, and its approval
"""
