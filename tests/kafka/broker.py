"""A real Apache Kafka for development and tests: fetched, formatted, started, waited for, stopped.

    python tests/kafka/broker.py ensure                 the jars (or the container image) are there
    python tests/kafka/broker.py run --port 9092        in the foreground, until Ctrl-C
    python tests/kafka/broker.py start --brokers 3      in the background; prints the bootstrap address
    python tests/kafka/broker.py stop                   ends what `start` began

Kafka runs in KRaft mode, every process being broker and controller, on Java 17 or newer with the jars that Maven
resolves from the pom beside this file. Where there is no Java but a container engine answers, the official image of
the same version runs instead. All data lies in a fresh folder that is removed at the end: nothing here is durable.
The standard library is all this needs, so that it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import base64
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

from means import (
    HERE,
    JAVA,
    LIB,
    STORE,
    BrokerError,
    container_engine,
    ensure,
    has_jars,
    has_java,
    image,
    kafka_version,
)
from nodes import Listener, quick, settings_of

_JAVA = ["java", "-Xmx512m", "-Xms256m", "-XX:+UseSerialGC", "-XX:-UsePerfData"]
_JAVA += [f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}", "-cp", f"{LIB}/*"]
_BRIEF = "-XX:TieredStopAtLevel=1"
"""For what is over within a minute or two: compiled once, and soon, where otherwise what runs often is compiled anew,
and better."""

STATE = STORE / "started.json"
START_SECONDS = 90.0
STOP_SECONDS = 20.0
PORTS = range(20_000, 32_768)
"""Below the ports that outgoing connections take, so that nobody takes the port of a broker while it is down."""


# --- a cluster --------------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    """Ports that are free now. Another process may still take one: `start` then tries again with others."""
    free: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        free.append(port)
        if len(free) == count:
            return free
    raise BrokerError(f"no {count} ports are free between {PORTS.start} and {PORTS.stop}: end what listens there")


def brokers_known(address: str, timeout: float = 2.0) -> list[int]:
    """Numbers of the brokers that the one at `address` ("host:port") says are in service; none where nothing answers.

    A Metadata request, version 1, with no topics: the smallest request that only a working broker can answer.
    """
    host, port = address.rsplit(":", 1)
    client = b"deformer-broker"
    body = struct.pack(">hhih", 3, 1, 7, len(client)) + client + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, int(port)), timeout) as s, s.makefile("rb") as answer:
            s.sendall(struct.pack(">i", len(body)) + body)
            (length,) = struct.unpack(">i", answer.read(4))
            head = answer.read(length)
        _, count = struct.unpack_from(">ii", head)
        numbers, at = [], 8
        for _ in range(count):  # number, host, port, rack: null
            number, length = struct.unpack_from(">ih", head, at)
            numbers.append(number)
            at += 6 + length + 6
    except (OSError, struct.error):  # nothing there, or it hung up in the middle of a word
        return []
    return numbers


@dataclass
class Broker:
    """A running cluster. `bootstrap` is what clients are given: "host:port" of every broker, with commas.

    `guarded` has the address of every further listener by its name. Brokers are numbered from 1, in the order of
    `bootstrap`. One that was ended by `kill` or `stop_node` comes back with `start_node`, with its data and its port.
    lasting: see `start`.
    """

    bootstrap: str
    folder: str
    guarded: dict[str, str] = field(default_factory=dict)
    pids: list[int | None] = field(default_factory=list)  # of broker 1, 2, …; None while it is down
    engine: str | None = None
    container: str | None = None
    lasting: bool = False

    def kill(self, node: int) -> None:
        """End broker `node` as a power cut would: SIGKILL."""
        self._end([node], signal.SIGKILL)

    def stop_node(self, node: int) -> None:
        """End broker `node` in order: it hands its partitions over, where there is another broker to take them."""
        self._end([node], signal.SIGTERM)

    def start_node(self, *nodes: int) -> None:
        """Start brokers that are down and wait until they are in service, which takes a majority of all brokers: after
        more of them have failed, start them in one call. Raises BrokerError where they do not come up."""
        for node in nodes:
            if self.container is not None and self.engine is not None:
                _engine(self.engine, "start", self.container)
            elif self._pid(node) is None:
                self.pids[node - 1] = _launch(Path(self.folder), node, self.lasting)
        self._await(nodes)

    def stop(self) -> None:
        """End every process by its id and remove the data, for which nobody has to end in order. Twice does no harm."""
        self._end(range(1, len(self.pids) + 1), signal.SIGKILL)
        self.pids.clear()
        if self.engine is not None and self.container is not None:
            _engine(self.engine, "rm", "--force", "--volumes", self.container)
            self.container = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def running(self) -> bool:
        """Whether every process that was started still runs; of a container nothing is known."""
        return all(pid is not None and _alive(pid) for pid in self.pids)

    def _pid(self, node: int) -> int | None:
        if not 1 <= node <= self.bootstrap.count(",") + 1:
            raise BrokerError(f"there is no broker {node}: they are numbered from 1, at {self.bootstrap}")
        return self.pids[node - 1] if self.pids else None

    def _end(self, nodes: Sequence[int], number: signal.Signals) -> None:
        """Signal these brokers and wait for their end; who does not heed the signal in time is killed."""
        pids = {node: pid for node in nodes if (pid := self._pid(node)) is not None}
        if nodes and self.container is not None and self.engine is not None:
            _engine(self.engine, "kill" if number is signal.SIGKILL else "stop", self.container)
        for pid in pids.values():
            _signal(pid, number)
        deadline = time.monotonic() + STOP_SECONDS
        for node, pid in pids.items():
            while _alive(pid):
                if time.monotonic() > deadline:
                    _signal(pid, signal.SIGKILL)
                time.sleep(0.02)
            self.pids[node - 1] = None

    def _await(self, nodes: Iterable[int]) -> None:
        """Wait until each of these brokers says of itself and of the others of them that they are in service."""
        deadline = time.monotonic() + START_SECONDS
        addresses = self.bootstrap.split(",")
        while any(not set(nodes) <= set(brokers_known(addresses[node - 1])) for node in nodes):
            for node in nodes:
                pid = self._pid(node)
                if pid is not None and not _alive(pid):
                    log = (Path(self.folder) / f"broker-{node}.log").read_text(errors="replace")
                    raise BrokerError(f"broker {node} ended while starting: {_last_line(log)}")
            if time.monotonic() > deadline:
                raise BrokerError(f"the broker at {self.bootstrap} is not in service after {START_SECONDS:.0f} s")
            time.sleep(0.05)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


def _alive(pid: int) -> bool:
    """Whether the process runs; a child of ours that has ended is collected on the way."""
    try:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    except ChildProcessError:
        pass  # started by an earlier command, so not ours to collect
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal(pid: int, number: signal.Signals) -> None:
    if _alive(pid):
        os.kill(pid, number)


def start(
    brokers: int = 1,
    port: int | None = None,
    listeners: Mapping[str, Listener] | None = None,
    features: Mapping[str, int] | None = None,
    lasting: bool = False,
) -> Broker:
    """Start a cluster on fresh data and wait until every broker is in service. The caller must `stop` it.

    port: of the first broker, the others follow it; None takes free ones. listeners: name → further listener of the
    first broker, where clients must show who they are; names are letters, and not SSL, which means more to the image.
    features: name → version, to have the cluster as one of an older release makes it (transaction.version=1).
    lasting: it is for more than a few minutes, and quicker after the first one. Raises BrokerError where the means are
    missing (run `ensure`) or the cluster does not come up.
    """
    if brokers < 1:
        raise BrokerError(f"--brokers {brokers}: at least one broker is needed")
    by_java = has_java() and has_jars()
    engine = None if by_java else container_engine()
    if not by_java and engine is None:
        raise BrokerError("the jars of Apache Kafka are missing: run `python tests/kafka/broker.py ensure`")
    if engine is not None and (brokers > 1 or features):
        raise BrokerError(
            f"several brokers, or features, need Java {JAVA} and Maven: install them, or run one broker in {engine}"
        )
    for attempt in range(3):
        free = free_ports(2 * brokers + len(listeners or {}))
        ports = free[:brokers] if port is None else list(range(port, port + brokers))
        if port is not None and (taken := [p for p in ports if brokers_known(f"127.0.0.1:{p}")]):
            raise BrokerError(f"port {taken[0]} already has a broker: stop it or choose another --port")
        addresses = ",".join(f"127.0.0.1:{p}" for p in ports)
        broker = Broker(addresses, tempfile.mkdtemp(prefix="deformer-kafka-"), lasting=lasting)
        host = "127.0.0.1" if engine is None else "0.0.0.0"  # noqa: S104 -- within the container
        doors = {
            name: (p, door) for p, (name, door) in zip(free[2 * brokers :], (listeners or {}).items(), strict=True)
        }
        broker.guarded = {name: f"127.0.0.1:{p}" for name, (p, _) in doors.items()}
        nodes = [
            settings_of(i, host, p, free[brokers : 2 * brokers], doors if i == 1 else {})
            for i, p in enumerate(ports, 1)
        ]
        try:
            if engine is None:
                _start_java(broker, nodes, features or {})
            else:
                _start_container(broker, engine, nodes[0], [ports[0], *(p for p, _ in doors.values())])
            broker._await(range(1, brokers + 1))
        except BaseException as error:
            broker.stop()
            if port is None and attempt < 2 and "Address already in use" in str(error):
                continue
            raise
        return broker
    raise AssertionError("unreachable: the last attempt returns or raises")


def _start_java(broker: Broker, nodes: list[dict[str, str]], features: Mapping[str, int]) -> None:
    folder = Path(broker.folder)
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    for number, settings in enumerate(nodes, 1):
        settings = {**quick(len(nodes)), **settings, "log.dirs": str(folder / f"data-{number}")}
        config = folder / f"server-{number}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        form = [*_JAVA, _BRIEF, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config)]
        form += [word for name, version in features.items() for word in ("--feature", f"{name}={version}")]
        done = subprocess.run(form, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BrokerError(f"formatting the broker's storage failed: {_last_line(done.stderr or done.stdout)}")
        broker.pids.append(_launch(folder, number, broker.lasting))


def _launch(folder: Path, number: int, lasting: bool) -> int:
    """Start broker `number` on what `folder` has of it; its process id."""
    words = _JAVA if lasting else [*_JAVA, _BRIEF]
    with (folder / f"broker-{number}.log").open("ab") as out:
        # A session of its own: Ctrl-C reaches this script alone, which then stops the broker in order.
        process = subprocess.Popen(
            [*words, f"-Djava.io.tmpdir={folder}", "kafka.Kafka", str(folder / f"server-{number}.properties")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    process.returncode = 0  # its end is watched through the process id; keeps Popen from warning about it
    return process.pid


def _start_container(broker: Broker, engine: str, settings: dict[str, str], ports: list[int]) -> None:
    """The image takes a property as a variable: a dot is one underscore in it, an underscore two, a hyphen three."""
    settings = {**quick(1), **settings}
    names = {key: key.replace("_", "__").replace("-", "___").replace(".", "_").upper() for key in settings}
    words = [part for port in ports for part in ("-p", f"127.0.0.1:{port}:{port}")]
    words += [part for key, value in settings.items() for part in ("-e", f"KAFKA_{names[key]}={value}")]
    broker.engine = engine
    broker.container = _engine(engine, "run", "-d", *words, image()).splitlines()[-1]


def _engine(engine: str, verb: str, *words: str) -> str:
    """Let the container engine do something; what it answers."""
    done = subprocess.run([engine, verb, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BrokerError(f"{engine} {verb} failed: {_last_line(done.stderr)}")
    return done.stdout.strip()


def _last_line(log: str) -> str:
    """The line of a log that best says what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "Caused by" in line or "already in use" in line or "Exception:" in line]
    return (telling or lines or ["it said nothing"])[-1][:300]


# --- commands ---------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> None:
    ensure()

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        with start(args.brokers, args.port, lasting=True) as broker:
            print(
                f"Apache Kafka {kafka_version()} at {broker.bootstrap} (Ctrl-C ends it and removes its data)",
                flush=True,
            )
            while broker.running():
                time.sleep(0.5)
            raise BrokerError("the broker ended by itself")
    except KeyboardInterrupt:
        print("kafka: stopped", file=sys.stderr)


def _start(args: argparse.Namespace) -> None:
    ensure()
    if STATE.exists():
        raise BrokerError(f"a broker was started before ({STATE}): run `python tests/kafka/broker.py stop` first")
    broker = start(args.brokers, args.port, lasting=True)
    STORE.mkdir(exist_ok=True)
    STATE.write_text(json.dumps(asdict(broker)))
    print(broker.bootstrap)


def _stop(_: argparse.Namespace) -> None:
    if not STATE.exists():
        raise BrokerError("no broker was started by `start`")
    Broker(**json.loads(STATE.read_text())).stop()
    STATE.unlink()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Apache Kafka for development and tests.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("ensure", help="fetch what a broker needs").set_defaults(act=lambda _: ensure())
    for name, act, text in (("run", _run, "in the foreground"), ("start", _start, "in the background")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--port", type=int, default=9092 if name == "run" else None, help="of the first broker")
        command.add_argument("--brokers", type=int, default=1, help="how many brokers (default: 1)")
        command.set_defaults(act=act)
    commands.add_parser("stop", help="end what `start` began").set_defaults(act=_stop)
    args = parser.parse_args(argv)
    try:
        args.act(args)
    except BrokerError as error:
        print(f"kafka: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
