"""Tests of the script that runs a Kafka broker for development and tests."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition

from tests.conftest import ROOT, load_broker_script, start_broker

SCRIPT = ROOT / "tests" / "kafka" / "broker.py"


def test_compose_runs_the_version_of_the_pom() -> None:
    images = re.findall(r"image: apache/kafka:(\S+)", (ROOT / "deploy" / "compose.yaml").read_text())
    assert set(images) == {load_broker_script().kafka_version()}


@pytest.mark.kafka
def test_run_ends_on_interrupt_and_removes_its_data(tmp_path: Path) -> None:
    script = load_broker_script()
    (port,) = script.free_ports(1)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # Processes in the background of a shell inherit that SIGINT is ignored; in a terminal it is not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"127.0.0.1:{port}" in line
        assert script.list_brokers(f"127.0.0.1:{port}") == [1]
        assert len(list(tmp_path.glob("deformer-kafka-*"))) == 1
        second_run = subprocess.run(
            [sys.executable, str(SCRIPT), "run", "--port", str(port)], capture_output=True, check=False
        )
        assert second_run.returncode == 4
        assert b"already has a broker" in second_run.stderr
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert script.list_brokers(f"127.0.0.1:{port}") == []
    assert list(tmp_path.glob("deformer-kafka-*")) == []


def send(bootstrap: str, value: bytes) -> None:
    """Send a message to the topic `t`."""
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    producer.send("t", value, partition=0).get(30)
    producer.close()


@pytest.mark.kafka
def test_killed_broker_is_restarted_with_its_data() -> None:
    script = load_broker_script()
    with start_broker() as broker:
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        admin.create_topics(["t"])
        admin.close()
        send(broker.bootstrap, b"1")
        broker.kill(1)
        assert script.list_brokers(broker.bootstrap) == []
        assert not broker.is_running()
        broker.start_node(1)
        broker.start_node(1)  # a running broker stays as it is
        send(broker.bootstrap, b"2")
        reader = KafkaConsumer(
            bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=30_000
        )
        reader.assign([TopicPartition("t", 0)])
        assert [message.value for message in itertools.islice(reader, 2)] == [b"1", b"2"]
        reader.close()
        with pytest.raises(script.BrokerError, match="no broker 2"):
            broker.kill(2)
        broker.stop_node(1)
        broker.stop_node(1)
        assert script.list_brokers(broker.bootstrap) == []
        assert Path(broker.folder).is_dir()
    assert not Path(broker.folder).exists()


@pytest.mark.parametrize("words", [["ensure"], ["run"], ["start"]])
def test_missing_java_and_container_engine_are_reported_in_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_broker_script()
    installation = sys.modules["installation"]
    for name in ("has_java", "has_jars", "find_container_engine"):
        monkeypatch.setattr(installation, name, lambda: None)
    monkeypatch.setattr(installation.shutil, "which", lambda name: None)
    assert script.main(words) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "openjdk-17-jre-headless maven" in err
    assert "DEFORMER_TEST_BOOTSTRAP" in err


def test_start_does_not_download_missing_jars(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_broker_script()
    monkeypatch.setattr(script, "has_jars", lambda: False)
    monkeypatch.setattr(script, "find_container_engine", lambda: None)
    with pytest.raises(script.BrokerError, match=r"broker\.py ensure"):
        script.start()
