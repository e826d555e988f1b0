"""Run a real Apache Kafka for development and tests.

    python tests/kafka/broker.py ensure                 install the jars (or the container image)
    python tests/kafka/broker.py run --port 9092        run a broker in the foreground, until Ctrl-C
    python tests/kafka/broker.py start --brokers 3      start brokers in the background; prints the bootstrap address
    python tests/kafka/broker.py stop                   stop the brokers that `start` has started

Kafka runs in KRaft mode, in which each process is a broker and a controller. It needs Java 17 or newer and the jars
that Maven resolves from `pom.xml`. Without Java, the official container image of the same version is used if a
container engine is running. All data is in a temporary folder that is removed at the end.

This script needs only the standard library, so that it runs before the project is installed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from broker_settings import Listener, make_broker_settings, make_cluster_settings
from installation import (
    DATA_FOLDER,
    JAR_FOLDER,
    MIN_JAVA_VERSION,
    SCRIPT_FOLDER,
    BrokerError,
    ensure,
    find_container_engine,
    get_image_name,
    has_jars,
    has_java,
    kafka_version,
)

_JAVA = ["java", "-Xmx512m", "-Xms256m", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
_JAVA += [f"-Dlog4j2.configurationFile={SCRIPT_FOLDER / 'log4j2.properties'}", "-cp", f"{JAR_FOLDER}/*"]
_FAST_START = "-XX:TieredStopAtLevel=1"
"""A Java option for processes that run for a few minutes: code is compiled once and early, without optimisation."""

ARCHIVE = DATA_FOLDER / "classes.jsa"
"""The classes that a broker loads at its start, in the form in which Java maps them into memory; see `make_archive`."""

STATE_FILE = DATA_FOLDER / "started.json"
"""The brokers that `start` has started in the background."""
START_SECONDS = 90.0
STOP_SECONDS = 20.0
ARCHIVE_SECONDS = 120.0
"""Time in which a broker must have ended that writes the archive of classes at its end."""
PORTS = range(20_000, 32_768)
"""Ports for brokers. The operating system takes higher ports for outgoing connections, so no client occupies the port
of a broker that is down."""


# --- a cluster --------------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Return ports that are free now. Another process may still take one; `start` then tries again with others."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise BrokerError(f"fewer than {count} ports are free between {PORTS.start} and {PORTS.stop}: end other servers")


def list_brokers(address: str, timeout: float = 2.0) -> list[int]:
    """Return the numbers of the brokers that are in service, according to one broker.

    It sends a Metadata request, version 1, without topics, the smallest request that only a working broker can answer.

    Args:
        address: "host:port" of the broker.
        timeout: Seconds to wait for the response.

    Returns:
        The numbers, or an empty list if there is no response.
    """
    host, port = address.rsplit(":", 1)
    client_id = b"deformer-broker"
    body = struct.pack(">hhih", 3, 1, 7, len(client_id)) + client_id + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, int(port)), timeout) as connection, connection.makefile("rb") as stream:
            connection.sendall(struct.pack(">i", len(body)) + body)
            (length,) = struct.unpack(">i", stream.read(4))
            response = stream.read(length)
        _, count = struct.unpack_from(">ii", response)
        numbers, position = [], 8
        for _ in range(count):  # each entry: number, length of the host, host, port, rack (null)
            number, length = struct.unpack_from(">ih", response, position)
            numbers.append(number)
            position += 6 + length + 6
    except (OSError, struct.error):  # nothing listens, or the connection was closed within the response
        return []
    return numbers


@dataclass
class Broker:
    """A running cluster of brokers, which are numbered from 1 in the order of `bootstrap`.

    A broker that was ended by `kill` or `stop_node` can be started again by `start_node`, with its data and its port.

    Attributes:
        bootstrap: "host:port" of every broker, separated by commas, as clients expect it.
        folder: The folder of all data.
        address_by_listener: "host:port" of each further listener, by its name.
        pids: The process id of each broker, None while it is down. Empty if a container runs the broker.
        engine: The container engine, or None.
        container: The id of the container, or None.
        is_long_running: See `start`.
    """

    bootstrap: str
    folder: str
    address_by_listener: dict[str, str] = field(default_factory=dict)
    pids: list[int | None] = field(default_factory=list)
    engine: str | None = None
    container: str | None = None
    is_long_running: bool = False

    def kill(self, node: int) -> None:
        """End a broker with SIGKILL, as a power failure would."""
        self._end([node], signal.SIGKILL)

    def stop_node(self, node: int) -> None:
        """End a broker in an orderly way: it first hands its partitions over, if there is another broker."""
        self._end([node], signal.SIGTERM)

    def suspend(self, node: int) -> None:
        """Stop the process of a broker, which then accepts connections and answers nothing, until `resume`."""
        self._send_to_process(node, signal.SIGSTOP, "pause")
        pid = self._get_pid(node)
        while pid is not None and _is_alive(pid) and not _is_stopped(pid):
            time.sleep(0.01)

    def resume(self, node: int) -> None:
        """Let the process of a broker continue after `suspend`."""
        self._send_to_process(node, signal.SIGCONT, "unpause")

    def _send_to_process(self, node: int, signal_number: signal.Signals, command: str) -> None:
        """Send a signal to a broker, or call a command of the container engine for its container."""
        pid = self._get_pid(node)
        if pid is not None:
            _send_signal(pid, signal_number)
        elif self.container is not None and self.engine is not None:
            _run_engine(self.engine, command, self.container)

    def start_node(self, *nodes: int) -> None:
        """Start brokers that are down, and wait until they are in service.

        A majority of all brokers must be running for that. If more of them are down, start them in one call.

        Raises:
            BrokerError: A broker does not start.
        """
        for node in nodes:
            if self.container is not None and self.engine is not None:
                _run_engine(self.engine, "start", self.container)
            elif self._get_pid(node) is None:
                self.pids[node - 1] = _launch(Path(self.folder), node, self.is_long_running)
        self._wait_until_in_service(nodes)

    def stop(self) -> None:
        """Kill every process and remove the data. May be called more than once."""
        self._end(range(1, len(self.pids) + 1), signal.SIGKILL)
        self.pids.clear()
        if self.engine is not None and self.container is not None:
            _run_engine(self.engine, "rm", "--force", "--volumes", self.container)
            self.container = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def is_running(self) -> bool:
        """Return whether every process that was started is running. Containers are not checked."""
        return all(pid is not None and _is_alive(pid) for pid in self.pids)

    def _get_pid(self, node: int) -> int | None:
        """Return the process id of a broker, or None if it is down or runs in a container."""
        if not 1 <= node <= self.bootstrap.count(",") + 1:
            raise BrokerError(f"there is no broker {node}: they are numbered from 1, at {self.bootstrap}")
        return self.pids[node - 1] if self.pids else None

    def _end(self, nodes: Sequence[int], signal_number: signal.Signals, seconds: float = STOP_SECONDS) -> None:
        """Send a signal to brokers and wait until they have ended. A broker that does not end in time is killed."""
        pid_by_node = {node: pid for node in nodes if (pid := self._get_pid(node)) is not None}
        if nodes and self.container is not None and self.engine is not None:
            _run_engine(self.engine, "kill" if signal_number is signal.SIGKILL else "stop", self.container)
        for pid in pid_by_node.values():
            _send_signal(pid, signal_number)
        deadline = time.monotonic() + seconds
        for node, pid in pid_by_node.items():
            while _is_alive(pid):
                if time.monotonic() > deadline:
                    _send_signal(pid, signal.SIGKILL)
                time.sleep(0.02)
            self.pids[node - 1] = None

    def _wait_until_in_service(self, nodes: Iterable[int]) -> None:
        """Wait until each of the given brokers reports that all of them are in service."""
        deadline = time.monotonic() + START_SECONDS
        addresses = self.bootstrap.split(",")
        while any(not set(nodes) <= set(list_brokers(addresses[node - 1])) for node in nodes):
            for node in nodes:
                pid = self._get_pid(node)
                if pid is not None and not _is_alive(pid):
                    log = (Path(self.folder) / f"broker-{node}.log").read_text(errors="replace")
                    raise BrokerError(f"broker {node} ended while starting: {_find_error_line(log)}")
            if time.monotonic() > deadline:
                raise BrokerError(f"the broker at {self.bootstrap} is not in service after {START_SECONDS:.0f} s")
            time.sleep(0.05)

    def __enter__(self) -> Broker:
        """Return the cluster itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the cluster and remove its data."""
        self.stop()


def _is_alive(pid: int) -> bool:
    """Return whether a process is running. If it is an ended child of this process, its exit status is collected."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass  # started by an earlier command, so not a child of this process
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _is_stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped after SIGSTOP."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            states.append((task / "stat").read_text().rpartition(") ")[2][:1])
    return set(states) == {"T"}


def _send_signal(pid: int, signal_number: signal.Signals) -> None:
    """Send a signal to a process if it is running."""
    if _is_alive(pid):
        os.kill(pid, signal_number)


def start(
    brokers: int = 1,
    port: int | None = None,
    listeners: Mapping[str, Listener] | None = None,
    features: Mapping[str, int] | None = None,
    is_long_running: bool = False,
) -> Broker:
    """Start a cluster without data and wait until every broker is in service. The caller must call `stop`.

    Args:
        brokers: Number of brokers.
        port: The port of the first broker; the others have the ports after it. None takes free ones.
        listeners: Further listeners of the first broker, by name. A name consists of letters, and "SSL" is not
            possible, because the container image uses it.
        features: Version by feature, to create a cluster like one of an older release, for example
            {"transaction.version": 1}.
        is_long_running: Whether the cluster runs for more than a few minutes. It then starts more slowly and becomes
            faster later.

    Raises:
        BrokerError: The jars or the image are missing (run `ensure`), or the cluster does not start.
    """
    if brokers < 1:
        raise BrokerError(f"--brokers {brokers}: at least one broker is needed")
    uses_java = has_java() and has_jars()
    engine = None if uses_java else find_container_engine()
    if not uses_java and engine is None:
        raise BrokerError("the jars of Apache Kafka are missing: run `python tests/kafka/broker.py ensure`")
    if engine is not None and (brokers > 1 or features):
        raise BrokerError(
            f"several brokers, or features, need Java {MIN_JAVA_VERSION} and Maven: install them, or run one broker in "
            f"{engine}"
        )
    for attempt in range(3):
        ports = free_ports(2 * brokers + len(listeners or {}))
        controller_ports, listener_ports = ports[brokers : 2 * brokers], ports[2 * brokers :]
        broker_ports = ports[:brokers] if port is None else list(range(port, port + brokers))
        used_ports = [] if port is None else [p for p in broker_ports if list_brokers(f"127.0.0.1:{p}")]
        if used_ports:
            raise BrokerError(f"port {used_ports[0]} already has a broker: stop it or choose another --port")
        addresses = ",".join(f"127.0.0.1:{p}" for p in broker_ports)
        folder = tempfile.mkdtemp(prefix="deformer-kafka-")
        broker = Broker(addresses, folder, is_long_running=is_long_running)
        host = "127.0.0.1" if engine is None else "0.0.0.0"  # noqa: S104 -- within the container
        named_listeners = zip(listener_ports, (listeners or {}).items(), strict=True)
        port_and_listener = {name: (listener_port, listener) for listener_port, (name, listener) in named_listeners}
        broker.address_by_listener = {name: f"127.0.0.1:{p}" for name, (p, _) in port_and_listener.items()}
        settings_of_brokers = [
            make_broker_settings(number, host, p, controller_ports, port_and_listener if number == 1 else {})
            for number, p in enumerate(broker_ports, 1)
        ]
        try:
            if engine is None:
                _start_java(broker, settings_of_brokers, features or {})
            else:
                _start_container(broker, engine, settings_of_brokers[0], [broker_ports[0], *listener_ports])
            broker._wait_until_in_service(range(1, brokers + 1))
        except BaseException as error:
            broker.stop()
            if port is None and attempt < 2 and "Address already in use" in str(error):
                continue
            raise
        return broker
    raise AssertionError("unreachable: the last attempt returns or raises")


def _start_java(broker: Broker, settings_of_brokers: list[dict[str, str]], features: Mapping[str, int]) -> None:
    """Format the storage of each broker and start its process.

    Args:
        broker: The cluster; the process ids are added to it.
        settings_of_brokers: The settings of each broker.
        features: Version by feature.

    Raises:
        BrokerError: The storage cannot be formatted.
    """
    folder = Path(broker.folder)
    cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    cluster_settings = make_cluster_settings(len(settings_of_brokers))
    for number, broker_settings in enumerate(settings_of_brokers, 1):
        settings = {**cluster_settings, **broker_settings, "log.dirs": str(folder / f"data-{number}")}
        config = folder / f"server-{number}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        command = [*_JAVA, *_list_archive_options(), _FAST_START, "kafka.tools.StorageTool", "format"]
        command += ["-t", cluster_id, "-c", str(config)]
        command += [word for name, version in features.items() for word in ("--feature", f"{name}={version}")]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            reason = _find_error_line(result.stderr or result.stdout)
            raise BrokerError(f"formatting the broker's storage failed: {reason}")
        broker.pids.append(_launch(folder, number, broker.is_long_running))


def _list_archive_options() -> list[str]:
    """Return the options with which Java uses the archive of classes. One that does not fit is ignored."""
    return [f"-XX:SharedArchiveFile={ARCHIVE}", "-Xlog:cds*=off"] if ARCHIVE.exists() else []


def make_archive() -> None:
    """Write the archive of classes with which brokers start in two thirds of the time, unless there is one.

    A broker writes it at its end. Without Java or the jars, this function does nothing.
    """
    if not (has_java() and has_jars()):
        return
    if ARCHIVE.exists() and ARCHIVE.stat().st_mtime >= (JAR_FOLDER / "pom.sha256").stat().st_mtime:
        return
    print("kafka: storing the classes of the broker …", file=sys.stderr, flush=True)
    with start() as broker:
        broker.stop_node(1)
        partial = Path(broker.folder) / ARCHIVE.name
        broker.pids[0] = _launch(Path(broker.folder), 1, False, f"-XX:ArchiveClassesAtExit={partial}")
        broker._wait_until_in_service([1])
        broker._end([1], signal.SIGTERM, ARCHIVE_SECONDS)
        if partial.exists():
            # Another run may do the same at this time, and brokers have mapped the file that it replaces.
            descriptor, name = tempfile.mkstemp(dir=DATA_FOLDER, prefix=ARCHIVE.name)
            os.close(descriptor)
            shutil.copy(partial, name)
            os.replace(name, ARCHIVE)


def _launch(folder: Path, number: int, is_long_running: bool, *options: str) -> int:
    """Start the process of a broker and return its id.

    Args:
        folder: The folder with the settings and the data of the cluster.
        number: The number of the broker.
        is_long_running: Whether the broker runs for more than a few minutes.
        *options: Options of Java in place of those that use the archive of classes.
    """
    java = [*_JAVA, *(options or _list_archive_options()), *([] if is_long_running else [_FAST_START])]
    with (folder / f"broker-{number}.log").open("ab") as output:
        # In a session of its own, the broker does not receive Ctrl-C. This script receives it and stops the broker.
        process = subprocess.Popen(
            [*java, f"-Djava.io.tmpdir={folder}", "kafka.Kafka", str(folder / f"server-{number}.properties")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    process.returncode = 0  # prevents a warning of Popen; the process is watched through its id
    return process.pid


def _start_container(broker: Broker, engine: str, broker_settings: dict[str, str], ports: list[int]) -> None:
    """Start a container with one broker.

    The image reads settings from environment variables, in whose names a dot is "_", an underscore "__" and a hyphen
    "___".

    Args:
        broker: The cluster; the container is added to it.
        engine: The container engine.
        broker_settings: The settings of the broker.
        ports: The ports of all listeners.
    """
    settings = {**make_cluster_settings(1), **broker_settings}
    names = {key: key.replace("_", "__").replace("-", "___").replace(".", "_").upper() for key in settings}
    options = [word for port in ports for word in ("-p", f"127.0.0.1:{port}:{port}")]
    options += [word for key, value in settings.items() for word in ("-e", f"KAFKA_{names[key]}={value}")]
    broker.engine = engine
    broker.container = _run_engine(engine, "run", "-d", *options, get_image_name()).splitlines()[-1]


def _run_engine(engine: str, command: str, *arguments: str) -> str:
    """Run a command of the container engine and return its output; raise `BrokerError` if it fails."""
    result = subprocess.run([engine, command, *arguments], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BrokerError(f"{engine} {command} failed: {_find_error_line(result.stderr)}")
    return result.stdout.strip()


def _find_error_line(log: str) -> str:
    """Return the line of a log that most probably states the reason of a failure: the last error, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    markers = ("Caused by", "already in use", "Exception:")
    error_lines = [line for line in lines if any(marker in line for marker in markers)]
    return (error_lines or lines or ["there was no output"])[-1][:300]


# --- commands ---------------------------------------------------------------------------------------------------------


def _ensure(_: argparse.Namespace) -> None:
    """Install what a broker needs."""
    ensure()
    try:
        make_archive()
    except BrokerError as error:  # brokers also start without it
        print(f"kafka: the classes of the broker are not stored, so its starts take longer: {error}", file=sys.stderr)


def _run(args: argparse.Namespace) -> None:
    """Run brokers in the foreground until Ctrl-C or SIGTERM."""
    ensure()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        with start(args.brokers, args.port, is_long_running=True) as broker:
            print(
                f"Apache Kafka {kafka_version()} at {broker.bootstrap} (Ctrl-C ends it and removes its data)",
                flush=True,
            )
            while broker.is_running():
                time.sleep(0.5)
            raise BrokerError("the broker ended unexpectedly: run the command again")
    except KeyboardInterrupt:
        print("kafka: stopped", file=sys.stderr)


def _start(args: argparse.Namespace) -> None:
    """Start brokers in the background and print their address."""
    ensure()
    if STATE_FILE.exists():
        raise BrokerError(f"a broker is already started ({STATE_FILE}): run `python tests/kafka/broker.py stop` first")
    broker = start(args.brokers, args.port, is_long_running=True)
    DATA_FOLDER.mkdir(exist_ok=True)
    STATE_FILE.write_text(json.dumps(asdict(broker)))
    print(broker.bootstrap)


def _stop(_: argparse.Namespace) -> None:
    """Stop the brokers that `start` has started."""
    if not STATE_FILE.exists():
        raise BrokerError("no broker was started by `start`: there is nothing to stop")
    Broker(**json.loads(STATE_FILE.read_text())).stop()
    STATE_FILE.unlink()


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        argv: The command and its options; by default those of the process.
    """
    parser = argparse.ArgumentParser(description="Run a real Apache Kafka for development and tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    ensure_command = commands.add_parser("ensure", help="install what a broker needs")
    ensure_command.set_defaults(function=_ensure)
    descriptions = (
        ("run", _run, "run brokers in the foreground"),
        ("start", _start, "start brokers in the background"),
    )
    for name, function, description in descriptions:
        command = commands.add_parser(name, help=description)
        default_port = 9092 if name == "run" else None
        command.add_argument("--port", type=int, default=default_port, help="port of the first broker")
        command.add_argument("--brokers", type=int, default=1, help="number of brokers (default: 1)")
        command.set_defaults(function=function)
    stop_command = commands.add_parser("stop", help="stop the brokers that `start` has started")
    stop_command.set_defaults(function=_stop)
    args = parser.parse_args(argv)
    try:
        args.function(args)
    except BrokerError as error:
        print(f"kafka: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
