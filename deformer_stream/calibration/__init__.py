"""Statistics with guarantees: p-values of records, the share of false alarms, drift, and evidence for incidents.

All of them compare new records with stored normal ones, the calibration records. The modules are:

    conformal            p-values and thresholds of records with a bounded number of readings
    cusum                p-values of records with irregular readings, by cumulative sums
    marginals, sensor_steps   distributions of single sensors, which the cumulative sums use
    torch_scoring, calibration_scores   the scores of calibration records
    recalibrate          a new calibration of the same network
    seen_records         fingerprints of the records that a model has seen
    drift, drift_state   whether the records of a stream still resemble the calibration records
    false_alarms         how many false alarms are compatible with the guarantee
    auroc                how well scores distinguish anomalous records from normal ones

    incident_budget      the number of false incidents that a user accepts, and the rule that keeps it
    incident_segments    the segment rule
    observed_time        the time by which numbers of false incidents are divided
    incident_evidence, conditional_e_values   the rule by e-values
    false_alarm_patterns, share_vectors       kinds of false incidents that people have labelled
    fault_classifier     names of known faults
"""
