"""The OPC UA source with a real server of asyncua in this process."""

from __future__ import annotations

import asyncio
import datetime
import json
import struct
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asyncua import Client, Node, Server, ua
from asyncua.client.ua_session import UaSession
from asyncua.common.utils import ServiceError
from asyncua.crypto.permission_rules import User, UserRole
from asyncua.server.monitored_item_service import MonitoredItemService
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from connectors.opcua import OpcuaOptions, OpcuaSource
from connectors.opcua import source as source_module
from deformer_stream import log
from deformer_stream.codec.bridge_messages import BridgeMessage, TranslationOptions, translate_all
from deformer_stream.engine.events import RejectionReason
from deformer_stream.errors import ConfigError, Unavailable
from tests.conftest import find_free_port

PATIENCE_SECONDS = 60.0
SECRET, PASSPHRASE = "hunter2-äöü", "swordfish-äöü"


class Identity:
    """An RSA key and a certificate with an application URI, signed by an authority or by the key itself.

    Args:
        folder: Where the files are written.
        name: The name of the owner, and of the files.
        authority: The signer.
        is_expired: Whether the certificate is not valid any more.
        passphrase: Passphrase of the file of the key, "" for none.

    Attributes:
        certificate: Path of the certificate as PEM.
        key: Path of the key as PEM.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        authority: Identity | None = None,
        is_expired: bool = False,
        passphrase: str = "",
    ) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.private_key = rsa.generate_private_key(65537, 2048)
        self.uri = f"urn:plant:{name}"
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        signer = authority or self
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(signer.name)
            .public_key(self.private_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * day)
            .not_valid_after(now - day if is_expired else now + day)
            .add_extension(x509.BasicConstraints(ca=name == "authority", path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(self.uri)]), critical=False)
            .sign(signer.private_key, hashes.SHA256())
        )
        lock: Any = serialization.NoEncryption()
        if passphrase:
            lock = serialization.BestAvailableEncryption(passphrase.encode())
        encoding = serialization.Encoding.PEM
        self.certificate, self.key = folder / f"{name}.pem", folder / f"{name}-key.pem"
        self.certificate.write_bytes(certificate.public_bytes(encoding))
        self.key.write_bytes(self.private_key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, lock))


class Operators:
    """Accepts the user `bridge` with a password.

    Args:
        password: The password.
    """

    def __init__(self, password: str) -> None:
        self._password = password

    def get_user(
        self, iserver: Any, username: str | None = None, password: str | None = None, certificate: Any = None
    ) -> User | None:
        """Return the user of a login, None if it is refused."""
        return User(role=UserRole.User) if (username, password) == ("bridge", self._password) else None


class SimulatedServer:
    """An OPC UA server with the object `Pump7`, which has the variables `Flow`, `State` and `Counts`.

    Args:
        identity: Its key and certificate. With them it accepts only Basic256Sha256 with encryption.
        client: The certificate of the only client that it accepts, with an identity.
        password: The password of the user `bridge`, with an identity.

    Attributes:
        url: Its address.
        pump: Id of the object.
    """

    def __init__(self, identity: Identity | None = None, client: Path | None = None, password: str = "") -> None:
        self._identity, self._client, self._password = identity, client, password
        self.url = f"opc.tcp://127.0.0.1:{find_free_port()}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.call(self._start())
        self.call(self.add_pump())
        self.pump = str(self._pump.nodeid.to_string())

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine in the loop of the server, and return its result."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(PATIENCE_SECONDS)

    async def _start(self) -> None:
        self._server = Server(user_manager=Operators(self._password) if self._identity else None)
        await self._server.init()
        self._server.set_endpoint(self.url)
        if self._identity is None:
            self._server.set_security_policy([ua.SecurityPolicyType.NoSecurity])
        else:
            await self._server.set_application_uri(self._identity.uri)
            self._server.set_security_policy([ua.SecurityPolicyType.Basic256Sha256_SignAndEncrypt])
            await self._server.load_certificate(self._identity.certificate)
            await self._server.load_private_key(self._identity.key)
            self._server.set_certificate_validator(self._check_client)
        self._index = await self._server.register_namespace("plant")
        await self._server.start()

    async def add_pump(self) -> None:
        """Add the object with its variables."""
        index = self._index
        self._pump = await self._server.nodes.objects.add_object(ua.NodeId("pump", index), f"{index}:Pump7")
        self.variables = {
            "Flow": await self._pump.add_variable(index, "Flow", 1.5),
            "State": await self._pump.add_variable(index, "State", "idle"),
            "Counts": await self._pump.add_variable(index, "Counts", [1, 2]),
        }

    def restart_without_pump(self) -> None:
        """End the server, and start it without the object."""
        self.call(self._server.stop())
        self.call(self._start())

    async def add_tanks(self, count: int) -> None:
        """Add a number of further objects, each with one variable."""
        for number in range(count):
            tank = await self._server.nodes.objects.add_object(self._index, f"Tank{number}")
            await tank.add_variable(self._index, "Level", 1.0)

    async def _check_client(self, certificate: x509.Certificate, _description: Any) -> None:
        """Refuse other clients than the one that is known."""
        if self._client is None or certificate != x509.load_pem_x509_certificate(self._client.read_bytes()):
            raise ServiceError(ua.StatusCodes.BadCertificateUntrusted)

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


def test_an_unexpected_error_of_the_library_ends_the_connection_and_not_the_source(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the thread would end, and the source would count as connected for ever, without any reading."""
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=0.05))
    receive(source, 3)

    async def fail(_: Client) -> None:
        monkeypatch.undo()
        raise struct.error("unpack requires a buffer of 4 bytes")

    monkeypatch.setattr(Client, "check_connection", fail)
    receive(source, 3)  # the first values of the second subscription
    assert source.num_connections == 2
    source.close()


def test_nodes_that_are_missing_after_a_restart_are_waited_for(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller starts before its program is loaded."""
    source = OpcuaSource(OpcuaOptions(server.url, (server.pump,), sampling_interval=0.05, patience=PATIENCE_SECONDS))
    receive(source, 3)
    missed = threading.Event()
    find = OpcuaSource._find_variables

    async def watch(*arguments: Any) -> Any:
        try:
            return await find(*arguments)
        except ConfigError:
            missed.set()
            raise

    monkeypatch.setattr(OpcuaSource, "_find_variables", watch)
    server.restart_without_pump()
    assert missed.wait(PATIENCE_SECONDS)
    server.call(server.add_pump())
    assert {topic for topic, _, _ in receive(source, 3)} == {"Pump7/Flow", "Pump7/State", "Pump7/Counts"}
    assert source.num_connections == 2
    source.close()


def lose_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next check of a connection report that it is lost."""
    check = Client.check_connection

    async def fail(_: Client) -> None:
        monkeypatch.setattr(Client, "check_connection", check)
        raise ConnectionError("lost")

    monkeypatch.setattr(Client, "check_connection", fail)


def test_nodes_that_stay_missing_end_the_source(server: SimulatedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    source = OpcuaSource(OpcuaOptions(server.url, (server.pump,), sampling_interval=0.05, patience=0.5))
    receive(source, 3)

    async def miss(_: Node) -> None:
        raise ua.uaerrors.BadNodeIdUnknown

    monkeypatch.setattr(Node, "read_browse_name", miss)
    lose_connection(monkeypatch)
    with pytest.raises(ConfigError, match="--nodes"):
        receive(source, 1)
    source.close()


@pytest.mark.parametrize(
    ("status", "is_final"), [(ua.uaerrors.BadTooManySessions, False), (ua.uaerrors.BadUserAccessDenied, True)]
)
def test_a_session_that_is_refused_at_a_reconnection(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, status: type[ua.UaError], is_final: bool
) -> None:
    """The server may still count the session before, but a login that is refused does not become right later."""
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=0.05, patience=PATIENCE_SECONDS))
    receive(source, 3)
    create = Client.create_session

    async def refuse(_: Client) -> None:
        monkeypatch.setattr(Client, "create_session", create)
        raise status

    monkeypatch.setattr(Client, "create_session", refuse)
    lose_connection(monkeypatch)
    if is_final:
        with pytest.raises(ConfigError, match="refuses the connection"):
            receive(source, 3)
    else:
        receive(source, 3)
        assert source.num_connections == 2
    source.close()


def test_a_server_with_many_variables_has_time_to_list_them(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object takes one request, and the time to connect bounds only single requests."""
    num_objects, seconds = 10, 0.4
    server.call(server.add_tanks(num_objects))
    monkeypatch.setattr(source_module, "CONNECT_SECONDS", num_objects * seconds / 4)
    browse, read = UaSession.browse, UaSession.read
    num_reads = 0

    async def browse_slowly(*arguments: Any) -> Any:
        await asyncio.sleep(seconds)
        return await browse(*arguments)

    async def count_read(*arguments: Any, **options: Any) -> Any:
        nonlocal num_reads
        num_reads += 1
        return await read(*arguments, **options)

    monkeypatch.setattr(UaSession, "browse", browse_slowly)
    monkeypatch.setattr(UaSession, "read", count_read)
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=0.05))
    assert len(receive(source, 3 + num_objects)) == 3 + num_objects
    assert num_reads < num_objects
    source.close()


def test_what_is_refused(server: SimulatedServer) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        OpcuaSource(OpcuaOptions(server.url, ("ns=2;i=99999",)))
    with pytest.raises(Unavailable, match="--source"):
        OpcuaSource(OpcuaOptions(f"opc.tcp://127.0.0.1:{find_free_port()}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the certificates of these tests."""
    folder = tmp_path_factory.mktemp("certificates")
    Identity(folder, "own")
    Identity(folder, "client", passphrase=PASSPHRASE)
    Identity(folder, "other-client", passphrase=PASSPHRASE)
    Identity(folder, "stranger", Identity(folder, "own"))
    return folder


@pytest.fixture(scope="module")
def secured(folder: Path) -> Iterator[SimulatedServer]:
    """Return a server that requires certificates and a login."""
    running = SimulatedServer(Identity(folder, "server", Identity(folder, "authority")), folder / "client.pem", SECRET)
    yield running
    running.stop()


def make_secured_options(secured: SimulatedServer, folder: Path) -> OpcuaOptions:
    """Return the options with which the server accepts a client."""
    return OpcuaOptions(
        secured.url,
        sampling_interval=0.05,
        username="bridge",
        password=SECRET,
        policy="Basic256Sha256",
        cafile=folder / "authority.pem",
        certfile=folder / "client.pem",
        keyfile=folder / "client-key.pem",
        key_password=PASSPHRASE,
    )


@pytest.mark.parametrize("trusted", ["authority.pem", "server.pem"])
def test_an_encrypted_connection(
    secured: SimulatedServer, folder: Path, trusted: str, capfd: pytest.CaptureFixture[str]
) -> None:
    options = replace(make_secured_options(secured, folder), cafile=folder / trusted)
    assert SECRET not in repr(options)
    assert PASSPHRASE not in repr(options)
    source = OpcuaSource(options)
    assert {topic for topic, _, _ in receive(source, 3)} == {"Pump7/Flow", "Pump7/State", "Pump7/Counts"}
    secured.write("Flow", time.time())
    assert receive(source, 1)[0][0] == "Pump7/Flow"
    source.close()
    output = "".join(capfd.readouterr())
    assert SECRET not in output
    assert PASSPHRASE not in output


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cafile": "own.pem"}, "is not accepted .*--source-cafile"),
        ({"cafile": "stranger.pem"}, "is not accepted .*--source-cafile"),
        ({"cafile": "client-key.pem"}, "--source-cafile .* cannot be used"),
        ({"certfile": "missing.pem"}, "--source-certfile .* cannot be used"),
        ({"key_password": "wrong"}, "--source-key-password-file"),
        ({"key_password": None}, "--source-key-password-file"),
        ({"policy": "Aes256Sha256RsaPss"}, "but Basic256Sha256 with SignAndEncrypt: choose another --opcua-policy"),
        ({"mode": "Sign"}, "does not offer Basic256Sha256 with Sign,"),
        ({"password": "wrong"}, "--source-password-file"),
        ({"certfile": "other-client.pem", "keyfile": "other-client-key.pem"}, "--source-certfile"),
    ],
)
def test_encrypted_connections_that_are_refused(
    secured: SimulatedServer, folder: Path, changes: dict[str, Any], words: str
) -> None:
    files = {name: folder / value for name, value in changes.items() if name.endswith("file")}
    with pytest.raises(ConfigError, match=words) as error:
        OpcuaSource(replace(make_secured_options(secured, folder), **(changes | files)))
    assert SECRET not in str(error.value)
    assert PASSPHRASE not in str(error.value)


def test_an_expired_certificate_of_a_server_is_refused(folder: Path, tmp_path: Path) -> None:
    expired = SimulatedServer(Identity(tmp_path, "server", is_expired=True), folder / "client.pem", SECRET)
    options = replace(make_secured_options(expired, folder), cafile=tmp_path / "server.pem")
    with pytest.raises(ConfigError, match="it has expired"):
        OpcuaSource(options)
    expired.stop()


def test_numbers_that_are_not_finite_are_refused(server: SimulatedServer) -> None:
    """A null would say that the sensor will not be observed."""
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=0.05))
    receive(source, 3)
    server.write("Flow", float("nan"))
    messages: list[BridgeMessage] = []
    while not messages:
        messages += source.poll(0.1)
    source.close()
    translation = translate_all(TranslationOptions().make_translator(), messages)
    assert translation.events == []
    (rejection,) = translation.rejections
    assert (rejection.reason, "Flow" in rejection.detail) == (RejectionReason.NOT_FINITE, True)


def watch_items(monkeypatch: pytest.MonkeyPatch, refused: Collection[ua.NodeId] = ()) -> list[float]:
    """Return a list that receives the sampling interval of each variable that clients ask servers for.

    Args:
        monkeypatch: Changes the servers.
        refused: Variables that servers do not report.
    """
    intervals: list[float] = []
    create = MonitoredItemService._create_data_change_monitored_item

    async def watch(service: Any, params: Any) -> Any:
        intervals.append(params.RequestedParameters.SamplingInterval)
        if params.ItemToMonitor.NodeId in refused:
            params.ItemToMonitor.NodeId = ua.NodeId("missing", 2)
        return await create(service, params)

    monkeypatch.setattr(MonitoredItemService, "_create_data_change_monitored_item", watch)
    return intervals


def test_the_server_is_asked_for_the_sampling_interval_and_for_all_samples(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals = watch_items(monkeypatch)
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=1.0))
    receive(source, 3)
    for value in (1.0, 2.0, 3.0):  # within one report of the server
        server.write("Flow", value)
    assert [value for _, value, _ in receive(source, 3)] == [1.0, 2.0, 3.0]
    source.close()
    assert intervals == [1000.0] * 3


def test_variables_that_the_server_does_not_report_are_named(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log.configure()
    ids = {name: variable.nodeid for name, variable in server.variables.items()}
    watch_items(monkeypatch, [ids["Flow"]])
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=0.05))
    assert {topic for topic, _, _ in receive(source, 2)} == {"Pump7/State", "Pump7/Counts"}
    source.close()
    (event,) = [json.loads(line) for line in capsys.readouterr().err.splitlines() if "variables_refused" in line]
    assert (event["refused"], event["variables"]) == (1, ["Pump7/Flow"])
    watch_items(monkeypatch, ids.values())
    with pytest.raises(ConfigError, match="reports none of the 3 variables"):
        OpcuaSource(OpcuaOptions(server.url))


def test_changes_that_are_not_passed_on_take_limited_memory(
    server: SimulatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MAX_QUEUED", 3)
    source = OpcuaSource(OpcuaOptions(server.url, sampling_interval=0.05))
    messages: list[BridgeMessage] = []
    while len(messages) < 3:
        messages += source.poll(0.1)
    server.write("Flow", 2.5)
    assert [source.poll(0.2) for _ in range(5)] == [[]] * 5
    source.acknowledge(messages)
    assert receive(source, 1)[0][:2] == ("Pump7/Flow", 2.5)
    source.close()
