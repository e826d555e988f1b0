"""Incidents as text for people."""

from __future__ import annotations

from dataclasses import replace

from deformer_stream.codec.incident_text import list_facts, summarize_incident
from deformer_stream.incidents.events import SuspectReadings
from tests.incidents.examples import make_fleet_incident, make_incident, make_incidents


def test_title_names_the_device_and_what_came() -> None:
    incident = replace(make_incident(3, device="pump-7"), readings={})
    assert summarize_incident(incident) == (
        "pump-7: flow 31.9 to 33.2 m³/h, expected 119 to 127; pressure 5.2 to 5.31, expected 4.1 to 4.9; mode"
    )
    assert summarize_incident(replace(incident, suspects=())) == "pump-7: the readings are improbable"
    assert (
        summarize_incident(replace(incident, device="", suspects=())) == "the whole stream: the readings are improbable"
    )


def test_title_has_a_typical_reading_if_it_is_known() -> None:
    """The range of all readings is not comparable with the range that was expected for one of them."""
    incident = make_incident(3, device="pump-7")
    flow = replace(incident.suspects[0], came_low=31.9, came_high=140.0)
    readings = SuspectReadings((1, 2, 3), (32.2, 31.9, 140.0), (119.0, 118.0, 119.0), (127.0, 126.0, 127.0))
    incident = replace(incident, suspects=(flow,), readings={"flow": readings})
    assert summarize_incident(incident) == "pump-7: flow 31.9 m³/h, expected 118 to 126"


def test_title_leaves_out_suspects_without_a_share() -> None:
    incident = replace(make_incident(3, device="pump-7"), readings={})
    flow, pressure = incident.suspects[0], replace(incident.suspects[1], share=0.001)
    title = "pump-7: flow 31.9 to 33.2 m³/h, expected 119 to 127"
    assert summarize_incident(replace(incident, suspects=(flow, pressure))) == title


def test_title_of_a_fleet_incident() -> None:
    fleet = make_fleet_incident(3, make_incidents(3))
    assert summarize_incident(fleet).startswith("3 devices of hall-a: flow 31.9 to 33.2")


def test_equal_ends_are_one_value() -> None:
    incident = replace(make_incident(3, device="pump-7"), readings={})
    suspect = replace(incident.suspects[0], came_high=31.9)
    assert summarize_incident(replace(incident, suspects=(suspect,))) == "pump-7: flow 31.9 m³/h, expected 119 to 127"


def test_facts_name_the_model_among_several_ones() -> None:
    incident = make_incident(3, device="pump-7")
    assert list_facts(incident)["model"] == incident.model
    assert list_facts(replace(incident, model_name="pump"))["model"] == f"pump {incident.model}"


def test_facts_are_printable_and_bounded() -> None:
    for incident in make_incidents(100):
        facts = list_facts(incident)
        texts = [summarize_incident(incident), *facts, *facts.values()]
        assert all(text.isprintable() for text in texts)
        assert all(len(text) < 500 for text in texts)
        assert ("resolved" in facts) == (incident.state == "resolved")
