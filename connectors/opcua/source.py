"""A source of value changes of an OPC UA server, for `BridgePipeline`.

An asyncio loop in a thread of its own runs the client. OPC UA has no session that keeps changes for a client that is
away: what changes while this process does not run is lost, except for the last value, with which a subscription begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import orjson

from connectors.opcua.security import OpcuaOptions, secure_client
from deformer_stream import log
from deformer_stream.codec.bridge_messages import BridgeMessage
from deformer_stream.codec.timestamps import EPOCH
from deformer_stream.durations import UNITS_PER_SECOND
from deformer_stream.errors import ConfigError, Unavailable
from deformer_stream.extras import format_remedy, is_installed

if TYPE_CHECKING:
    from asyncua import Client, Node
    from asyncua.ua import NodeClass

CONNECT_SECONDS = 10.0
"""Longest time in seconds to connect, and for the answer to each further request."""

RETRY_SECONDS = 1.0
"""Time in seconds between two attempts to connect."""

CHECK_SECONDS = 2.0
"""Time in seconds between two checks of the connection."""

MAX_QUEUED = 100_000
"""Number of changes that are stored until they are passed on. Beyond it, the oldest ones are dropped with a warning."""

SAMPLES_PER_REPORT = 10
"""Largest number of values of a variable that the server stores until it reports them."""

MAX_LISTED = 5
"""Largest number of variables that a warning names."""

MAX_DEPTH = 32
"""Number of levels of objects below a given node in which variables are searched."""

REFUSED_STATUSES = ("BadCertificate", "BadIdentityToken", "BadUserAccessDenied", "BadUserSignatureInvalid")
"""Beginnings of the names of the statuses with which a server refuses a login or a certificate."""


class _NotReadyError(ConfigError):
    """The server does not report what is subscribed to, or refuses a session for another reason than the login.

    At the first connection, the options are probably wrong. At a later one, a controller may have started whose program
    is loaded soon, or the server may still count the session before. Then it is tried again.
    """


class OpcuaSource:
    """A source of value changes. The topic of a message is the path of browse names of the node, such as `Pump7/Flow`.

    The constructor connects and subscribes.

    Args:
        options: The server, and what is subscribed to.

    Raises:
        Unavailable: The server does not respond.
        ConfigError: asyncua is not installed, a node does not exist, or the server refuses the login.
    """

    def __init__(self, options: OpcuaOptions) -> None:
        if not is_installed("asyncua"):
            raise ConfigError(f"an OPC UA source needs packages that are not installed: {format_remedy('opcua')}")
        self._options = options
        self._changes: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._path_by_id: dict[str, str] = {}  # by the id of each variable
        self._has_stopped, self._has_dropped = threading.Event(), False
        self._is_connected = False
        self._num_connections = self._num_unacknowledged = 0
        self._error: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        first = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(first,), name="opcua", daemon=True)
        self._thread.start()
        # A server that does not respond ends the thread sooner; one with many variables responds to many requests.
        first.wait(max(options.patience, 3 * CONNECT_SECONDS))
        if not self._is_connected:
            self.close()
            raise self._error or Unavailable(
                f"the OPC UA server at {options.url} takes too long to list its variables: name fewer with --nodes, or "
                "set a longer --patience"
            )

    @property
    def is_connected(self) -> bool:
        """Whether the subscription is active."""
        return self._is_connected

    @property
    def num_connections(self) -> int:
        """How often the subscription was made."""
        return self._num_connections

    def poll(self, timeout: float) -> Sequence[BridgeMessage]:
        """Return changes that have arrived, after at most `timeout` seconds.

        Raises:
            Unavailable: The server could not be reached for too long.
            ConfigError: The server refuses the login, or a node does not exist any more for too long.
        """
        messages: list[BridgeMessage] = []
        if self._num_unacknowledged >= MAX_QUEUED:
            self._has_stopped.wait(timeout)  # the other changes stay in the queue, which is bounded
            return messages
        with contextlib.suppress(queue.Empty):
            change = self._changes.get(timeout=timeout)
            while True:
                message = self._make_message(*change)
                if message is not None:
                    messages.append(message)
                change = self._changes.get_nowait()
        self._num_unacknowledged += len(messages)
        if not messages and self._error is not None and not self._is_connected:
            raise self._error
        return messages

    def acknowledge(self, messages: Sequence[BridgeMessage]) -> None:
        """Count messages as passed on. OPC UA has no acknowledgement of changes."""
        self._num_unacknowledged -= len(messages)

    def publish(self, topic: str, payload: bytes) -> None:
        """Do nothing, because nothing is published to OPC UA servers."""

    def close(self) -> None:
        """Close the connection."""
        self._has_stopped.set()
        if self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(CONNECT_SECONDS)
        self._is_connected = False

    def datachange_notification(self, node: Node, _value: Any, data: Any) -> None:
        """Store a change; asyncua calls this method in the thread of its loop."""
        if self._changes.qsize() >= MAX_QUEUED:
            if not self._has_dropped:
                self._has_dropped = True
                log.get_logger("opcua").warning("changes_dropped", server=self._options.url, stored=MAX_QUEUED)
            with contextlib.suppress(queue.Empty):
                self._changes.get_nowait()
        self._changes.put((self._path_by_id[node.nodeid.to_string()], data.monitored_item.Value))

    def _make_message(self, path: str, data: Any) -> BridgeMessage | None:
        """Return the message of a change, with the time that the device or the server states; None for a bad value.

        A number that is not finite is the whole payload, so that the translator rejects it for this reason.

        Args:
            path: The topic.
            data: The value, its status and its times.
        """
        if not data.StatusCode.is_good() or data.Value is None or data.Value.Value is None:
            return None  # no value is known, which says nothing about later values
        now = time.time_ns() // 1000
        value = data.Value.Value
        if isinstance(value, float) and not math.isfinite(value):
            # JSON would have null in its place, which says that the sensor will not be observed.
            return BridgeMessage(path, str(value).encode(), now)
        moment = data.SourceTimestamp or data.ServerTimestamp
        micros = now if moment is None else _to_micros(moment)
        seconds = micros / 1e6
        document = {
            self._options.value_field: value,
            self._options.time_field: seconds * UNITS_PER_SECOND[self._options.time_unit],
        }
        try:
            payload = orjson.dumps(document)
        except TypeError:  # a structure, bytes or a number of more than 64 bits, which the translator refuses
            payload = orjson.dumps(document | {self._options.value_field: []})
        return BridgeMessage(path, payload, now)

    def _run(self, first: threading.Event) -> None:
        """Run the loop of the client in this thread until `close` is called or an error ends it.

        Args:
            first: Set when the first attempt to connect has ended.
        """
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._stay_connected(first))
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            first.set()
            self._loop.close()

    async def _stay_connected(self, first: threading.Event) -> None:
        """Subscribe, and subscribe again after each loss of the connection."""
        away_since = time.monotonic()
        while not self._has_stopped.is_set():
            try:
                await self._subscribe_and_wait(first)
            except Exception as error:  # asyncua raises anything for an answer that it cannot decode
                if self._is_connected:
                    away_since = time.monotonic()
                    log.get_logger("opcua").warning(
                        "connection_lost", server=self._options.url, reason=_describe(error)
                    )
                self._is_connected = False
                is_final = isinstance(error, ConfigError) and not isinstance(error, _NotReadyError)
                if is_final or not first.is_set() or time.monotonic() - away_since > self._options.patience:
                    self._error = self._make_failure(error)
                    return
            await asyncio.sleep(RETRY_SECONDS)

    def _make_failure(self, error: Exception) -> ConfigError | Unavailable:
        """Return the error with which the source ends because of another error."""
        if isinstance(error, ConfigError):
            return error
        return Unavailable(
            f"the OPC UA server at {self._options.url} cannot be reached ({_describe(error)}): "
            "check --source and that the server is running"
        )

    async def _subscribe_and_wait(self, first: threading.Event) -> None:
        """Connect, subscribe to all nodes, and return or raise when the connection is lost.

        Raises:
            ConfigError: A node does not exist, or the server refuses the login, or the certificates do not fit.
            OSError: The connection is lost.
        """
        from asyncua import Client
        from asyncua.ua import Duration
        from asyncua.ua.uaerrors import UaError

        options = self._options
        client = Client(options.url, timeout=CONNECT_SECONDS)
        if options.policy != "None":
            async with asyncio.timeout(CONNECT_SECONDS):
                await secure_client(client, options)
        if options.username is not None:
            client.set_user(options.username)
            client.set_password(options.password or "")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                await client.connect()
        except UaError as error:
            status = type(error).__name__
            refusal = ConfigError if status.startswith(REFUSED_STATUSES) else _NotReadyError
            raise refusal(
                f"the OPC UA server at {options.url} refuses the connection ({status}): check --source-username, "
                "--source-password-file and --source-certfile"
            ) from None
        try:
            nodes = await self._find_variables(client)
            subscription = await client.create_subscription(1000.0 * options.sampling_interval, self)
            # The number of samples between two reports varies, so the server must store more than the last one.
            results = await subscription.subscribe_data_change(
                nodes, queuesize=SAMPLES_PER_REPORT, sampling_interval=Duration(1000.0 * options.sampling_interval)
            )
            self._report_refused(nodes, results)
            self._num_connections += 1
            self._is_connected = True
            log.get_logger("opcua").info("connected", server=options.url, variables=len(nodes))
            first.set()
            while True:
                await asyncio.sleep(CHECK_SECONDS)
                await client.check_connection()
        except UaError as error:
            raise ConnectionError(type(error).__name__) from None
        finally:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.disconnect(), CONNECT_SECONDS)

    def _report_refused(self, nodes: Sequence[Node], results: Sequence[Any]) -> None:
        """Log the variables that the server does not report, such as those that this user may not read.

        Args:
            nodes: The variables.
            results: For each of them, the id of its subscription, or the status with which it was refused.

        Raises:
            _NotReadyError: The server reports none of the variables.
        """
        paths = [self._path_by_id[node.nodeid.to_string()] for node in nodes]
        refused = [(path, result) for path, result in zip(paths, results, strict=True) if not isinstance(result, int)]
        if not refused:
            return
        status = refused[0][1].name
        if len(refused) == len(nodes):
            raise _NotReadyError(
                f"the OPC UA server at {self._options.url} reports none of the {len(nodes)} variables ({status}): "
                "check --nodes and the permissions of this user"
            )
        log.get_logger("opcua").warning(
            "variables_refused",
            server=self._options.url,
            refused=len(refused),
            variables=[path for path, _ in refused[:MAX_LISTED]],
            status=status,
        )

    async def _find_variables(self, client: Client) -> list[Node]:
        """Return the variables that are subscribed to, and store their paths.

        Raises:
            _NotReadyError: A node does not exist, or there are no variables.
        """
        from asyncua.ua.uaerrors import UaError

        roots = [client.get_node(text) for text in self._options.nodes] or [client.nodes.objects]
        self._path_by_id = {}
        found: list[Node] = []
        for text, root in zip(self._options.nodes or ("Objects",), roots, strict=True):
            try:
                name, node_class = (await root.read_browse_name()).Name, await root.read_node_class()
            except UaError as error:
                raise _NotReadyError(
                    f"the OPC UA server at {self._options.url} has no node {text!r} ({type(error).__name__}): "
                    "check --nodes"
                ) from None
            path = () if root == client.nodes.objects else (name,)
            await self._collect(client, root, node_class, path, found, 0)
        if not found:
            raise _NotReadyError(
                f"the OPC UA server at {self._options.url} has no variables below --nodes: choose others"
            )
        return found

    async def _collect(
        self,
        client: Client,
        node: Node,
        node_class: NodeClass,
        path: tuple[str, ...],
        found: list[Node],
        depth: int,
    ) -> None:
        """Add the variables at and below a node to a list, with their paths. Each object takes one request.

        Args:
            client: The client.
            node: The node.
            node_class: Its class.
            path: The browse names of the node and of those above it.
            found: Receives the variables.
            depth: Number of levels of objects above the node.
        """
        from asyncua.ua import NodeClass

        if node_class == NodeClass.Variable:
            if node.nodeid.to_string() not in self._path_by_id:
                self._path_by_id[node.nodeid.to_string()] = "/".join(part.replace("/", "_") for part in path)
                found.append(node)
            return
        if depth < MAX_DEPTH:
            for child in await node.get_children_descriptions():
                # The namespace 0 holds what describes the server itself.
                if child.NodeId.NamespaceIndex != 0:
                    path_of_child = (*path, child.BrowseName.Name)
                    child_node = client.get_node(child.NodeId)
                    await self._collect(client, child_node, child.NodeClass, path_of_child, found, depth + 1)


def _describe(error: Exception) -> str:
    """Return why a connection was lost or not made."""
    return str(error) if isinstance(error, OSError) and str(error) else repr(error)


def _to_micros(moment: datetime) -> int:
    """Return a time, which is in UTC if it has no zone, in microseconds since 1970."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - EPOCH) // timedelta(microseconds=1)
