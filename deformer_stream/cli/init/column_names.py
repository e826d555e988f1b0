"""What the names of columns usually mean: labels, answers, ids, devices, sensors, times, values and qualities."""

from __future__ import annotations

import re
import unicodedata

_GERMAN_LETTERS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss"})

LABEL_NAME = re.compile(
    r"(^|[^a-z])((is_?)?(anomal(y|ies|ous)|faults?|faulty|outliers?|defects?|defective|failures?|attacks?|labels?|"
    r"normal|healthy|good)|fehler[a-z]*|stoerung(en|s[a-z]*)?|stoermeldung(en)?|anomalien?|defekte?|schaden|schaeden|"
    r"ausfall|ausfaelle|ausschuss)([^a-z]|$)"
)
"""Names of columns that usually say whether a row is normal."""

RESULT_NAME = re.compile(
    r"(^|[^a-z])(results?|outcome|verdict|judge?ment|assessment|passed|pass_?fail|[a-z]*befund|[a-z]*bewertung|"
    r"[a-z]*ergebnis|urteil)([^a-z]|$)"
)
"""Names of columns that may say whether a row is normal, if their values say so, too."""

ANSWER_NAME = re.compile(r"(^|[^a-z])(change_?points?|root_?cause|target|fault_?(id|type|number)|split|fold)([^a-z]|$)")
"""Names of columns that were added by somebody who knows the faults, and that must not become features either."""

ID_NAME = re.compile(r"(^|[^a-z])(id|uuid|guid|index|serial(_?(no|number))?|row(_?(no|number))?|order_?no)$")
"""Names of columns that usually identify rows."""

RECORD_NAME = re.compile(
    r"^(?!(row|device|machine|sensor|user|operator)_?id$)([a-z0-9_]*_)?(id|uuid|guid|serial(_?(no|number))?|"
    r"(batch|lot|order|part|job|run)(_?(no|number))?|charge|chargennummer|auftrag|auftragsnummer|seriennummer)$"
)
"""Names of columns that usually name the record that a row is, such as a batch."""

DEVICE_NAME = re.compile(
    r"^(device|machine|asset|equipment|unit|pump|motor|vehicle|turbine|line|station)(_?(id|name))?$"
)
"""Names of columns that usually contain the device of a row."""

SENSOR_NAME = re.compile(
    r"^(tag|tag_?name|sensor|signal|point|variable|parameter|metric|channel|messstelle|messpunkt|kanal)(_?(id|name))?$"
)
"""Names of columns that usually contain the sensor of a reading, in a table with one reading per row."""

VALUE_NAME = re.compile(r"^(value|val|v|reading|measurement|wert|messwert)$")
TIME_NAME = re.compile(
    r"^((event_?|unix_?|epoch_?)?(time|timestamp|time_stamp|ts)(_?(s|ms|us|ns|utc))?|datetime|date_?time|t|epoch|clock|zeit|"
    r"zeitstempel|zeitpunkt|datum|date)$"
)
"""Names of columns that usually contain the value and the time of a reading."""

QUALITY_NAME = re.compile(r"(^|_)(quality|qualitaet|qual|opc_?quality|quality_?code|validity|valid)(_|$)")
"""Names of columns that usually say whether a reading is valid."""


def simplify_name(name: str) -> str:
    """Return a column's name in lower case and ASCII, with underscores between the words of one such as `isFault`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().translate(_GERMAN_LETTERS)
    return re.sub(r"[^a-z0-9]+", "_", unicodedata.normalize("NFKD", words).encode("ascii", "ignore").decode())


def may_be_label(name: str) -> bool:
    """Return whether a column, by its name, may say whether a row is normal."""
    return LABEL_NAME.search(simplify_name(name).replace("_", " ")) is not None


def has_result_name(name: str) -> bool:
    """Return whether a column, by its name, contains results, which may be normal or not."""
    return RESULT_NAME.search(simplify_name(name).replace("_", " ")) is not None
