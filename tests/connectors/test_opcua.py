"""The OPC UA source with a real server of asyncua in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from asyncua import Server, ua

from connectors.opcua import OpcuaOptions, OpcuaSource
from deformer_stream.errors import ConfigError, Unavailable
from tests.conftest import find_free_port

PATIENCE_SECONDS = 60.0


class SimulatedServer:
    """An OPC UA server with the object `Pump7`, which has the variables `Flow`, `State` and `Counts`.

    Attributes:
        url: Its address.
        pump: Id of the object.
    """

    def __init__(self) -> None:
        self.url = f"opc.tcp://127.0.0.1:{find_free_port()}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.pump = str(self.call(self._start()))

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the loop of the server, and return its result."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE_SECONDS)

    async def _start(self) -> str:
        self._server = Server()
        await self._server.init()
        self._server.set_endpoint(self.url)
        self._server.set_security_policy([ua.SecurityPolicyType.NoSecurity])
        index = await self._server.register_namespace("plant")
        pump = await self._server.nodes.objects.add_object(index, "Pump7")
        self.variables = {
            "Flow": await pump.add_variable(index, "Flow", 1.5),
            "State": await pump.add_variable(index, "State", "idle"),
            "Counts": await pump.add_variable(index, "Counts", [1, 2]),
        }
        await self._server.start()
        return str(pump.nodeid.to_string())

    def write(self, name: str, value: Any) -> None:
        """Change the value of a variable."""
        self.call(self.variables[name].write_value(value))

    def stop(self) -> None:
        """End the server."""
        self.call(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[SimulatedServer]:
    """Return a running OPC UA server."""
    running = SimulatedServer()
    yield running
    running.stop()


def receive(source: OpcuaSource, count: int) -> list[tuple[str, Any, float]]:
    """Return a number of changes as topics, values and times."""
    found: list[tuple[str, Any, float]] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, found
        for message in source.poll(0.1):
            document = json.loads(message.payload)
            found.append((message.topic, document["value"], document["time"]))
    return found


@pytest.mark.parametrize("names_node", [False, True])
def test_changes_of_variables(server: SimulatedServer, names_node: bool) -> None:
    nodes = (server.pump,) if names_node else ()
    source = OpcuaSource(OpcuaOptions(server.url, nodes, sampling_interval=0.05))
    assert source.is_connected
    first = receive(source, 3)
    assert {topic: value for topic, value, _ in first} == {
        "Pump7/Flow": 1.5,
        "Pump7/State": "idle",
        "Pump7/Counts": [1, 2],
    }
    assert all(abs(at - time.time()) < 600 for _, _, at in first)
    server.write("Flow", 2.5)
    assert receive(source, 1)[0][:2] == ("Pump7/Flow", 2.5)
    source.close()


def test_what_is_refused(server: SimulatedServer) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        OpcuaSource(OpcuaOptions(server.url, ("ns=2;i=99999",)))
    with pytest.raises(Unavailable, match="--source"):
        OpcuaSource(OpcuaOptions(f"opc.tcp://127.0.0.1:{find_free_port()}"))
