"""MQTT connector: messages of topics, acknowledged after they were passed on.

- `source` receives messages with an MQTT 5 session that outlives this process. Only it imports paho-mqtt.
"""

from connectors.mqtt.source import MqttOptions, MqttSource

__all__ = ["MqttOptions", "MqttSource"]
