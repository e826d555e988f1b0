"""Receivers of incidents: Alertmanager, PagerDuty, webhooks, and chat or mail by Apprise.

http              HTTP requests with a time limit for the whole request
alertmanager      Prometheus Alertmanager, API v2
pagerduty         PagerDuty, Events API v2
webhook           JSON over HTTP, signed as Standard Webhooks says, with the headers of CloudEvents
apprise_receiver  chat and mail
factory           creation of the receivers that options name
"""

from connectors.receivers.factory import make_receivers

__all__ = ["make_receivers"]
