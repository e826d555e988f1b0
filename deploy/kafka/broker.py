"""A real Apache Kafka for development and tests: fetched, formatted, started, waited for, stopped.

    python deploy/kafka/broker.py ensure                 the jars (or the container image) are there
    python deploy/kafka/broker.py run --port 9092        in the foreground, until Ctrl-C
    python deploy/kafka/broker.py start --brokers 3      in the background; prints the bootstrap address
    python deploy/kafka/broker.py stop                   ends what `start` began

Kafka runs in KRaft mode, every process being broker and controller, on Java 17 or newer with the jars that Maven
resolves from the pom beside this file. Where there is no Java but a container engine answers, the official image of
the same version runs instead. All data lies in a fresh folder that is removed at the end: nothing here is durable.
The standard library is all this needs, so that it runs before anything is installed.
"""

# ruff: noqa: S603 -- every command run here is made of this file's own words, ports and paths
from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
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

STATE = STORE / "started.json"
START_SECONDS = 90.0
STOP_SECONDS = 20.0


# --- a cluster --------------------------------------------------------------------------------------------------------


def _free_ports(count: int) -> list[int]:
    """Ports that are free now. Another process may still take one: `start` then tries again with others."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _quick(brokers: int) -> dict[str, str]:
    """Settings that make a small cluster start fast; internal topics are replicated as far as there are brokers."""
    copies, agreeing = str(min(3, brokers)), str(min(2, brokers))
    return {
        "auto.create.topics.enable": "false",  # a mistyped topic must be an error, not a new topic
        "num.partitions": "4",
        "default.replication.factor": copies,
        "min.insync.replicas": agreeing,
        "offsets.topic.replication.factor": copies,
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": agreeing,
        "transaction.state.log.num.partitions": "2",
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": agreeing,
        "share.coordinator.state.topic.num.partitions": "1",
        "group.initial.rebalance.delay.ms": "0",
        "controlled.shutdown.enable": str(brokers > 1).lower(),
    }


def _guarded(host: str, port: int, node: dict[str, str], users: Mapping[str, str]) -> dict[str, str]:
    """A further listener, to log in at. Who comes by the open one may do everything, these users nothing."""
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required "
    login += " ".join(f'user_{name}="{password}"' for name, password in users.items())
    return {
        "listeners": f"{node['listeners']},SASL_PLAINTEXT://{host}:{port}",
        "advertised.listeners": f"{node['advertised.listeners']},SASL_PLAINTEXT://127.0.0.1:{port}",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{login};",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }


def _node(node: int, host: str, port: int, controllers: list[int]) -> dict[str, str]:
    voters = ",".join(f"{i}@127.0.0.1:{p}" for i, p in enumerate(controllers, 1))
    return {
        "process.roles": "broker,controller",
        "node.id": str(node),
        "controller.quorum.voters": voters,
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controllers[node - 1]}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
    }


def brokers_known(address: str, timeout: float = 2.0) -> int:
    """How many brokers the one at `address` ("host:port") says are in service; 0 where nothing answers yet.

    A Metadata request, version 1, with no topics: the smallest request that only a working broker can answer.
    """
    host, port = address.rsplit(":", 1)
    client = b"deformer-broker"
    body = struct.pack(">hhih", 3, 1, 7, len(client)) + client + struct.pack(">i", 0)
    try:
        with socket.create_connection((host, int(port)), timeout) as s, s.makefile("rb") as answer:
            s.sendall(struct.pack(">i", len(body)) + body)
            head = answer.read(12)
    except OSError:
        return 0
    if len(head) < 12:
        return 0
    _, correlation, count = struct.unpack(">iii", head)
    return int(count) if correlation == 7 else 0


@dataclass
class Broker:
    """A running cluster. `bootstrap` is what clients are given: "host:port" of every broker, with commas.

    `guarded` is the address where one has to log in, if `start` was given users.
    """

    bootstrap: str
    folder: str
    guarded: str | None = None
    pids: list[int] = field(default_factory=list)
    engine: str | None = None
    container: str | None = None

    def stop(self) -> None:
        """End every process by its id, SIGTERM first, and remove the data. Doing it twice does no harm."""
        for pid in self.pids:
            _signal(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for pid in self.pids:
            while _alive(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            _signal(pid, signal.SIGKILL)
        self.pids.clear()
        if self.engine is not None and self.container is not None:
            subprocess.run([self.engine, "stop", self.container], capture_output=True, check=False)
            self.container = None
        shutil.rmtree(self.folder, ignore_errors=True)

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


def start(brokers: int = 1, port: int | None = None, users: Mapping[str, str] | None = None) -> Broker:
    """Start a cluster on fresh data and wait until every broker is in service. The caller must `stop` it.

    port: of the first broker, the others follow it; None takes free ones. users: name → password of a second listener
    of the first broker, where one has to log in (SASL, PLAIN) and then has no rights at all: for tests of refusals.
    Raises BrokerError where the means are missing (run `ensure`) or the cluster does not come up.
    """
    if brokers < 1:
        raise BrokerError(f"--brokers {brokers}: at least one broker is needed")
    by_java = has_java() and has_jars()
    engine = None if by_java else container_engine()
    if not by_java and engine is None:
        raise BrokerError("the jars of Apache Kafka are missing: run `python deploy/kafka/broker.py ensure`")
    if engine is not None and brokers > 1:
        raise BrokerError(f"several brokers need Java {JAVA} and Maven: install them, or run one broker in {engine}")
    for attempt in range(3):
        free = _free_ports(2 * brokers + 1)
        ports = free[:brokers] if port is None else list(range(port, port + brokers))
        if port is not None and (taken := [p for p in ports if brokers_known(f"127.0.0.1:{p}")]):
            raise BrokerError(f"port {taken[0]} already has a broker: stop it or choose another --port")
        broker = Broker(",".join(f"127.0.0.1:{p}" for p in ports), tempfile.mkdtemp(prefix="deformer-kafka-"))
        host = "127.0.0.1" if engine is None else "0.0.0.0"  # noqa: S104 -- within the container
        nodes = [_node(i, host, p, free[brokers:-1]) for i, p in enumerate(ports, 1)]
        if users:
            broker.guarded = f"127.0.0.1:{free[-1]}"
            nodes[0] |= _guarded(host, free[-1], nodes[0], users)
        try:
            if engine is None:
                _start_java(broker, nodes)
            else:
                _start_container(broker, engine, nodes[0], [ports[0], free[-1]])
            _await(broker, brokers)
        except BaseException as error:
            broker.stop()
            if port is None and attempt < 2 and "Address already in use" in str(error):
                continue
            raise
        return broker
    raise AssertionError("unreachable: the last attempt returns or raises")


def _start_java(broker: Broker, nodes: list[dict[str, str]]) -> None:
    folder = Path(broker.folder)
    cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    java = ["java", "-Xmx512m", "-Xms256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    java += [f"-Dlog4j2.configurationFile={HERE / 'log4j2.properties'}", "-cp", f"{LIB}/*"]
    for number, node in enumerate(nodes, 1):
        settings = {**_quick(len(nodes)), **node, "log.dirs": str(folder / f"data-{number}")}
        config = folder / f"server-{number}.properties"
        config.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        form = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(config)]
        done = subprocess.run(form, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BrokerError(f"formatting the broker's storage failed: {_last_line(done.stderr or done.stdout)}")
        with (folder / f"broker-{number}.log").open("wb") as out:
            # A session of its own: Ctrl-C reaches this script alone, which then stops the broker in order.
            process = subprocess.Popen(
                [*java, "kafka.Kafka", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        process.returncode = 0  # its end is watched through the process id; keeps Popen from warning about it
        broker.pids.append(process.pid)


def _start_container(broker: Broker, engine: str, node: dict[str, str], ports: list[int]) -> None:
    """The image takes a property as a variable: a dot is one underscore in it, an underscore two."""
    names = {key: key.replace("_", "__").replace(".", "_").upper() for key in (*_quick(1), *node)}
    command = [engine, "run", "-d", "--rm"]
    command += [part for port in ports for part in ("-p", f"127.0.0.1:{port}:{port}")]
    command += [part for key, value in {**_quick(1), **node}.items() for part in ("-e", f"KAFKA_{names[key]}={value}")]
    done = subprocess.run([*command, image()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BrokerError(f"{engine} could not run {image()}: {_last_line(done.stderr)}")
    broker.engine, broker.container = engine, done.stdout.strip().splitlines()[-1]


def _await(broker: Broker, brokers: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    addresses = broker.bootstrap.split(",")
    while any(brokers_known(address) < brokers for address in addresses):
        for node, pid in enumerate(broker.pids, 1):
            if not _alive(pid):
                log = (Path(broker.folder) / f"broker-{node}.log").read_text(errors="replace")
                raise BrokerError(f"the broker ended while starting: {_last_line(log)}")
        if time.monotonic() > deadline:
            raise BrokerError(f"the broker at {broker.bootstrap} is not in service after {START_SECONDS:.0f} s")
        time.sleep(0.05)


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
        with start(args.brokers, args.port) as broker:
            print(
                f"Apache Kafka {kafka_version()} at {broker.bootstrap} (Ctrl-C ends it and removes its data)",
                flush=True,
            )
            while broker.container is not None or all(_alive(pid) for pid in broker.pids):
                time.sleep(0.5)
            raise BrokerError("the broker ended by itself")
    except KeyboardInterrupt:
        print("kafka: stopped", file=sys.stderr)


def _start(args: argparse.Namespace) -> None:
    ensure()
    if STATE.exists():
        raise BrokerError(f"a broker was started before ({STATE}): run `python deploy/kafka/broker.py stop` first")
    broker = start(args.brokers, args.port)
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
