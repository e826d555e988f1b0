"""A candidate for the calibration of incidents, made from labels and kept evidence, and the difference that it makes.

"Today" means the calibration in use. The log of evidence is read several times from its start:

1. The incidents without patterns and those under today's patterns are computed. Labels name incidents by their ids.
2. The largest score of each incident is computed, and records are selected for review.
3. If requested, records and segments are calibrated again, without the records that a person has confirmed as faulty.
   If both are, they share no records (`LogSplit`): by comparison with themselves, records would have p-values that are
   too regular, and the threshold of the segments would be too low.
4. The incidents of the candidate are computed and compared with those of today.

Each past incident is compared with the others of its pattern and not with itself, because patterns have the same effect
on new incidents. If a confirmed fault would no longer be found with a pattern, suspects must match the pattern more
closely. If the fault is then still not found, the pattern is left out of the candidate.

A new calibration leaves out the records of confirmed faults and of known maintenance, and no others. This follows from
labels of incidents, labels of single records, and maintenance windows. If all unusual records were left out, it would
give too many alerts (Label-Trim, arXiv 2502.04807). The unlabelled records with the largest scores are offered for
review. So is a random sample of records without an alert, because labels of alerts give no information about faults
that were missed.

The modules are:

    make_proposal   the function `propose`, which takes these steps
    proposal        what it is given besides the log and the labels, and what it returns
    labelled_log    the log of evidence of a model, and what people have said about its records
    survey          steps 1 and 2: today's incidents, and the scores of records
    record_choice   which records are reviewed, and which ones calibrate records and segments
    candidate       step 4: replays of the candidate, until its patterns lose no confirmed fault
    new_segments    step 3 for segments; `incident_calibration` of `runtime` has the p-values of new records
    outcomes        rates of false incidents, effects of patterns, and warnings
"""

from deformer_stream.runtime.propose.make_proposal import propose
from deformer_stream.runtime.propose.outcomes import count_records_to_open
from deformer_stream.runtime.propose.proposal import (
    FalseRate,
    LogSummary,
    PatternOutcome,
    Proposal,
    ProposalOptions,
    Review,
    ReviewRecord,
)

__all__ = [
    "FalseRate",
    "LogSummary",
    "PatternOutcome",
    "Proposal",
    "ProposalOptions",
    "Review",
    "ReviewRecord",
    "count_records_to_open",
    "propose",
]
