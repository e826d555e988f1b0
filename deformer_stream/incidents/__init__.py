"""Incidents: one message for one fault of one device, made from the closed records and alerts of a stream.

    consume ─► TOPIC-evidence ─► IncidentTracker ─► TOPIC-incidents ─► receivers, the operator's page
                                                                            │
                            TOPIC-feedback ◄── labels of operators ◄────────┘

The tracker is a pure function of the log of evidence: it reads no clock and no label of an operator. The same log
therefore gives the same incidents, live, after a restart and in `replay`. The modules are:

    events         the types that pass between processes: evidence, incidents, labels
    device         the device of a record
    make_evidence  conversion of the results of the engine to evidence
    repetitions    evidence without what it repeats
    row_order      the order in which the rows of a log of evidence are handled
    tracker        the state machine that opens, updates and resolves incidents
    tracked_incident   the incident of a device in the state of the tracker
    suspects       the features to which the alerts of an incident are attributed
    series         series of bounded length
    fleet          fleet incidents: one incident for several devices
    label_times    the times of new labels
    overlay        how labels and maintenance windows change what is shown and delivered
"""
