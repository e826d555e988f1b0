"""Receivers of incidents: Alertmanager, PagerDuty, webhooks, and chat or mail by Apprise."""
