"""The receivers that the options of a command name."""

from __future__ import annotations

from collections import Counter

from connectors.receivers.alertmanager import Alertmanager
from connectors.receivers.apprise_receiver import AppriseReceiver, read_addresses
from connectors.receivers.pagerduty import PagerDuty, read_routing_key
from connectors.receivers.webhook import Webhook, read_key
from deformer_stream.errors import ConfigError
from deformer_stream.runtime.incident_ports import Receiver
from deformer_stream.settings.incident_commands import DeliverySettings


def make_receivers(settings: DeliverySettings, topic: str) -> list[Receiver]:
    """Return the receivers that options name. Their names and their identities are different.

    Args:
        settings: The options.
        topic: The topic of events, which webhooks state as the source.

    Raises:
        ConfigError: An address is not valid, a file with a secret cannot be read, or Apprise is missing.
    """
    timeout = settings.receiver_timeout
    if settings.webhook_secret_file is not None and not settings.webhook:
        raise ConfigError("--webhook-secret-file signs the requests to --webhook: give --webhook, too")
    key = None if settings.webhook_secret_file is None else read_key(settings.webhook_secret_file)
    receivers: list[Receiver] = [Alertmanager(url, timeout) for url in settings.alertmanager]
    receivers += [Webhook(url, key, topic, timeout) for url in settings.webhook]
    if settings.pagerduty_key_file is not None:
        routing_key = read_routing_key(settings.pagerduty_key_file)
        receivers.append(PagerDuty(settings.pagerduty_url, routing_key, timeout))
    addresses = [] if settings.notify is None else settings.notify.get_secret_value().split(",")
    if settings.notify_file is not None:
        addresses += read_addresses(settings.notify_file)
    receivers += [
        AppriseReceiver(address.strip(), number, timeout)
        for number, address in enumerate(filter(str.strip, addresses), start=1)
    ]
    _check_identities(receivers)
    _number_equal_names(receivers)
    return receivers


def _check_identities(receivers: list[Receiver]) -> None:
    """Raise `ConfigError` if two receivers have the same address, and would therefore share their progress."""
    names = [receiver.name for receiver in receivers]
    identities = [receiver.identity for receiver in receivers]
    for index, identity in enumerate(identities):
        if identity in identities[:index]:
            raise ConfigError(f"the address of {names[index]} is given twice: give each receiver once")


def _number_equal_names(receivers: list[Receiver]) -> None:
    """Append a number to each name that occurs before, so that metrics and logs distinguish the receivers."""
    num_by_name: Counter[str] = Counter()
    for receiver in receivers:
        num_by_name[receiver.name] += 1
        if num_by_name[receiver.name] > 1:
            receiver.name += f" {num_by_name[receiver.name]}"
