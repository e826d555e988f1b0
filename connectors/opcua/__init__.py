"""OPC UA connector: changes of the values of nodes. Only this package imports asyncua.

- `source` subscribes to nodes.
- `security` has the options of the connection, and encrypts it.
"""

from connectors.opcua.security import OpcuaOptions
from connectors.opcua.source import OpcuaSource

__all__ = ["OpcuaOptions", "OpcuaSource"]
