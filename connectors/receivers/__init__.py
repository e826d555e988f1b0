"""Receivers of incidents: Alertmanager, PagerDuty, webhooks, and chat or mail by Apprise.

http              requests with one limit for the whole request
alertmanager      Prometheus Alertmanager, API v2
pagerduty         PagerDuty, Events API v2
webhook           JSON by HTTP, signed (Standard Webhooks), with the headers of CloudEvents
apprise_receiver  chat and mail
factory           the receivers that options name
"""

from connectors.receivers.factory import make_receivers

__all__ = ["make_receivers"]
