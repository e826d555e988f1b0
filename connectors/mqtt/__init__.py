"""MQTT connector: messages of topics, acknowledged after they were passed on, and alerts.

- `source` receives messages with an MQTT 5 session that outlives this process.
- `alerts` publishes alerts.
- `client` creates the connections of both. No other package imports paho-mqtt.
"""

from connectors.mqtt.alerts import AlertTopic, MqttAlertSink
from connectors.mqtt.client import MqttOptions
from connectors.mqtt.source import MqttSource

__all__ = ["AlertTopic", "MqttAlertSink", "MqttOptions", "MqttSource"]
