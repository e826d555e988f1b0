"""OPC UA connector: changes of the values of nodes. Only `source` imports asyncua."""

from connectors.opcua.source import OpcuaOptions, OpcuaSource

__all__ = ["OpcuaOptions", "OpcuaSource"]
