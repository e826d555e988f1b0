"""The command `demo`: simulated pumps, a model of them, and their alerts.

simulate     the pumps: coupled sensors, faults, and readings that arrive asynchronously
operation    the same pumps in continuous operation
run, report  the demo, and its results as a page
training     its training, which continues an interrupted one
page_demo    the demo with the operator's page
"""
