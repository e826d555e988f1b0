"""Incidents: one message for one fault of one device, made from the closed records and alerts of a stream.

    consume ─► TOPIC-evidence ─► IncidentTracker ─► TOPIC-incidents ─► receivers, the operator's page
                                                                            │
                            TOPIC-feedback ◄── labels of operators ◄────────┘

The tracker is a pure function of the log of evidence: no clock and no label of an operator enters it. The same log
therefore gives the same incidents, live, after a restart and in `replay`. The modules are:

    events     the types that pass between processes: evidence, incidents, labels
    device     the device of a record
    make_evidence  evidence from what the engine returns
    tracker    the state machine that opens, updates and resolves incidents
    suspects, series, fleet  parts of its state: shares of suspects, bounded series, incidents of several devices
    overlay    what labels and maintenance windows change about what is shown and delivered
"""
