"""The development broker as a person uses it."""

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

SCRIPT = ROOT / "deploy" / "kafka" / "broker.py"


def test_compose_runs_the_version_of_the_pom() -> None:
    images = re.findall(r"image: apache/kafka:(\S+)", (ROOT / "deploy" / "compose.yaml").read_text())
    assert set(images) == {load_broker_script().kafka_version()}


@pytest.mark.kafka
def test_run_serves_until_interrupted_and_leaves_nothing(tmp_path: Path) -> None:
    script = load_broker_script()
    (port,) = script.free_ports(1)
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "run", "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # As from a terminal: shells let what they start in the background ignore Ctrl-C, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert f"127.0.0.1:{port}" in line
        assert script.brokers_known(f"127.0.0.1:{port}") == [1]
        assert len(list(tmp_path.glob("deformer-kafka-*"))) == 1
        again = subprocess.run(
            [sys.executable, str(SCRIPT), "run", "--port", str(port)], capture_output=True, check=False
        )
        assert again.returncode == 4
        assert b"already has a broker" in again.stderr
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert script.brokers_known(f"127.0.0.1:{port}") == []
    assert list(tmp_path.glob("deformer-kafka-*")) == []


def send(bootstrap: str, value: bytes) -> None:
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all")
    producer.send("t", value, partition=0).get(30)
    producer.close()


@pytest.mark.kafka
def test_a_broker_that_was_killed_comes_back_with_its_data() -> None:
    script = load_broker_script()
    with start_broker() as broker:
        admin = KafkaAdminClient(bootstrap_servers=broker.bootstrap)
        admin.create_topics(["t"])
        admin.close()
        send(broker.bootstrap, b"1")
        broker.kill(1)
        assert script.brokers_known(broker.bootstrap) == []
        assert not broker.running()
        broker.start_node(1)
        broker.start_node(1)  # it is up already: no harm
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
        assert script.brokers_known(broker.bootstrap) == []
        assert Path(broker.folder).is_dir()
    assert not Path(broker.folder).exists()


@pytest.mark.parametrize("words", [["ensure"], ["run"], ["start"]])
def test_without_any_means_one_line_says_what_to_do(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_broker_script()
    means = sys.modules["means"]
    for name in ("has_java", "has_jars", "container_engine"):
        monkeypatch.setattr(means, name, lambda: None)
    monkeypatch.setattr(means.shutil, "which", lambda name: None)
    assert script.main(words) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "openjdk-17-jre-headless maven" in err
    assert "DEFORMER_TEST_BOOTSTRAP" in err


def test_missing_jars_are_no_reason_to_fetch_them_in_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_broker_script()
    monkeypatch.setattr(script, "has_jars", lambda: False)
    monkeypatch.setattr(script, "container_engine", lambda: None)
    with pytest.raises(script.BrokerError, match=r"broker\.py ensure"):
        script.start()
