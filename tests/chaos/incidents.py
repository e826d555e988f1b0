"""Kill `deformer-stream incidents` with SIGKILL while evidence arrives, and compare its topic with an undisturbed run.

    python -m tests.chaos.incidents --kills 20
    python -m tests.chaos.incidents --kills 20 --models 3

A real Alertmanager is notified all the time. The last line of the output has the figures as JSON. The exit code is 0
if both of these hold:

- The values of each key of the topic of incidents equal those of a run without kills and those of `replay --incidents`.
- Alertmanager has shown each incident once, and once more for each time that it was reopened, and shows at the end the
  incidents that are open and not part of a fleet incident.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from connectors.kafka import describe_evidence_topic, ensure_topics, produce
from deformer_stream import model_store
from deformer_stream.codec.encode_evidence import encode_evidence
from deformer_stream.codec.encode_incidents import decode_incident
from deformer_stream.engine.events import ONLY_MODEL
from deformer_stream.incidents.events import EvidenceBatch, Incident
from deformer_stream.model_set import find_models
from tests.chaos.self_killing import INCIDENT_STEPS, TRANSACTIONS
from tests.conftest import load_broker_script, make_cluster
from tests.connectors.alertmanager import RunningAlertmanager, list_statuses, run_alertmanager
from tests.connectors.receiving_server import ReceivingServer
from tests.incidents.evidence_logs import make_log
from tests.integration.programs import Cluster, RunningConsumer, make_command, make_environment, wait_until
from tests.model_folders import write_folder
from tests.models import write_model

KILLED_EXIT_CODE = -9
STEPS = sorted({*TRANSACTIONS, *INCIDENT_STEPS})
"""Steps at which processes kill themselves; see `self_killing`."""

NUM_DEVICES, RECORDS_PER_BATCH, MAX_RECORDS = 12, 2, 200_000
RATE = 12.0
"""Messages of evidence per second. Faults begin and end all the time."""

RULE = ("--records-per-day", "8640", "--fleet", "3 within 10m")

GROUPS = [f"hall-{max(0, device - NUM_DEVICES // 2)}" for device in range(NUM_DEVICES)]
"""Half of the devices are one group, whose incidents become members of fleet incidents. Receivers get these instead of
the members. Each of the other devices is alone in its group, so receivers get its incidents."""


def run_kills(
    bootstrap: str,
    model_option: tuple[str, Path],
    folder: Path,
    num_kills: int,
    seconds_per_kill: float,
    seed: int,
) -> Any:
    """Kill a process repeatedly, and return the figures.

    Args:
        bootstrap: The broker.
        model_option: `--model` and a model directory, or `--models` and a folder of models, whose messages of evidence
            take turns.
        folder: Folder for logs and files.
        num_kills: Number of kills. Every second one is at a certain step, the others are after a random time.
        seconds_per_kill: Mean number of seconds after the start of a process until it is killed.
        seed: Seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    topic = f"events-{uuid.uuid4().hex[:8]}"
    brokers = make_cluster(bootstrap)
    ensure_topics(brokers, describe_evidence_topic(f"{topic}-evidence"))
    faults = {
        device: [
            (begin, begin + int(rng.integers(3, 40)))
            for begin in range(int(rng.integers(5, 60)), MAX_RECORDS, int(rng.integers(80, 160)))
        ]
        for device in range(NUM_DEVICES)
    }
    option, path = model_option
    path_by_name = find_models(path)[1] if option == "--models" else {ONLY_MODEL: path}
    log = _interleave(
        [
            (
                name,
                make_log(
                    str(model_store.read_manifest(directory)["fingerprint"]),
                    NUM_DEVICES,
                    MAX_RECORDS,
                    faults=faults,
                    records_per_batch=RECORDS_PER_BATCH,
                    seed=seed + number,
                    groups=GROUPS,
                ),
            )
            for number, (name, directory) in enumerate(path_by_name.items())
        ]
    )
    payloads: list[bytes] = []
    has_ended = threading.Event()

    def iterate_messages() -> Iterator[tuple[bytes, bytes, None]]:
        """Yield evidence until the last process was killed."""
        for batch in log:
            if has_ended.is_set():
                return
            payloads.append(encode_evidence(batch))
            yield b"", payloads[-1], None

    cluster = Cluster(bootstrap)

    def make_options(group: str) -> tuple[object, ...]:
        return (
            *("--topic", topic, *model_option, "--bootstrap-servers", bootstrap, "--group", group),
            *("--incidents-topic", f"{topic}-{group}", "--instance", group, "--session-timeout", "20s"),
            *("--snapshot-interval", "3s", "--commit-interval", "200ms", *RULE),
        )

    with closing(ReceivingServer()) as server, run_alertmanager(folder, server.url) as alertmanager:
        notify = ("--alertmanager", alertmanager.url, "--receiver-timeout", "5s")
        num_killed = 0
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(produce, brokers, f"{topic}-evidence", iterate_messages(), RATE)
            try:
                for number in range(num_kills):
                    is_at_step = number % 2 == 1
                    words = ("tests.chaos.self_killing", STEPS[number % len(STEPS)], int(rng.integers(2, 12)))
                    module = words if is_at_step else ("deformer_stream.cli.main",)
                    path = folder / f"killed-{number}.log"
                    options = (*make_options("killed"), *notify)
                    with RunningConsumer(path, *options, module=module, command="incidents") as process:
                        if is_at_step:
                            _wait_for_end(process, sending)
                            assert process.process.returncode == KILLED_EXIT_CODE, process.read_log()
                        else:
                            process.wait_until_ready()
                            time.sleep(float(rng.uniform(0.0, 2 * seconds_per_kill)))
                            process.process.kill()
                            process.process.wait()
                    num_killed += 1
            finally:
                has_ended.set()
            sending.result()
        figures: dict[str, Any] = {"kills": num_killed, "evidence_messages": len(payloads)}
        values = {}
        for group, options in (("whole", make_options("whole")), ("killed", (*make_options("killed"), *notify))):
            committed = f"{group}-{topic}-incidents"
            with RunningConsumer(folder / f"{group}.log", *options, command="incidents") as process:
                process.wait_for(cluster.is_consumed(f"{topic}-evidence", committed), "the rest of the evidence")
                values[group] = _group_by_key(cluster.read_topic(f"{topic}-{group}"))
                if group == "killed":
                    incidents = [decode_incident(messages[-1]) for messages in values[group].values()]
                    _wait_for_delivery(process, incidents, server)
                    figures |= _check_alertmanager(incidents, server, alertmanager)
                process.stop()
    (folder / "evidence.jsonl").write_bytes(b"\n".join(payloads) + b"\n")
    values["replay"] = _replay(folder, model_option)
    cluster.close()
    figures |= {"models": len(path_by_name), "incidents": len(values["whole"])}
    last_messages = [decode_incident(messages[-1]) for messages in values["whole"].values()]
    figures["in_fleets"] = sum(incident.parent is not None for incident in last_messages)
    figures["messages"] = sum(map(len, values["whole"].values()))
    whole, killed, replayed = values["whole"], values["killed"], values["replay"]
    figures["killed_differs"] = sum(killed.get(key) != whole.get(key) for key in killed.keys() | whole.keys())
    # At the end of its input, `replay` handles the last rows, too, which wait for earlier ones in a live process.
    figures["replay_differs"] = sum(replayed.get(key, [])[: len(whole[key])] != whole[key] for key in whole)
    num_more = sum(map(len, replayed.values())) - figures["messages"]
    figures["of_waiting_rows"] = num_more
    is_equal = figures["killed_differs"] == figures["replay_differs"] == figures["wrongly_notified"] == 0
    is_named = {incident.model_name for incident in last_messages} == set(path_by_name)
    is_bounded = 0 <= num_more <= 10 * NUM_DEVICES * len(path_by_name)
    figures["ok"] = is_equal and is_named and is_bounded and figures["notified"] > 0
    return figures


def _interleave(logs: list[tuple[str, Iterator[EvidenceBatch]]]) -> Iterator[EvidenceBatch]:
    """Yield the batches of logs in turn, with the name of the model of each log."""
    for batches in zip(*(log for _, log in logs), strict=True):
        for (name, _), batch in zip(logs, batches, strict=True):
            yield replace(batch, model_name=name)


def _is_shown_at_end(incident: Incident) -> bool:
    """Return whether a receiver shows an incident at the end. A fleet incident is shown in place of its members."""
    return incident.state != "resolved" and incident.parent is None


def _wait_for_delivery(process: RunningConsumer, incidents: list[Incident], server: ReceivingServer) -> None:
    """Wait until Alertmanager has notified a server of the last state of each incident."""

    def is_delivered() -> bool:
        last = {identifier: came[-1] for identifier, came in list_statuses(server).items()}
        return all(
            last.get(one.id, "resolved" if one.parent else "") == ("firing" if _is_shown_at_end(one) else "resolved")
            for one in incidents
        )

    process.wait_for(is_delivered, "Alertmanager to notify of all incidents")


def _check_alertmanager(
    incidents: list[Incident], server: ReceivingServer, alertmanager: RunningAlertmanager
) -> dict[str, Any]:
    """Return how many incidents Alertmanager has notified of, how many of them wrongly, and how many it shows now.

    A member of a fleet incident is resolved when that opens, or is not sent at all.
    """
    statuses = list_statuses(server)
    num_notified = len(statuses)
    wrong = []
    for incident in incidents:
        came = statuses.pop(incident.id, [])
        num_shown = came.count("firing")
        is_alternating = came == ["firing", "resolved"] * (len(came) // 2) + ["firing"] * (len(came) % 2)
        is_expected = 1 <= num_shown <= 1 + incident.num_reopened or (not came and incident.parent is not None)
        if not (is_alternating and is_expected):
            wrong.append((incident.id, came))
    shown = sorted(alert["labels"]["incident"] for alert in alertmanager.list_alerts())
    expected = sorted(incident.id for incident in incidents if _is_shown_at_end(incident))
    num_wrong = len(wrong) + len(statuses) + len(set(shown) ^ set(expected)) + len(shown) - len(set(shown))
    if num_wrong:
        print("wrong notifications:", wrong, "unknown:", statuses, "shown:", shown, expected, file=sys.stderr)
    return {"notified": num_notified, "shown_at_end": len(shown), "wrongly_notified": num_wrong}


def _wait_for_end(process: RunningConsumer, sending: Future[int]) -> None:
    """Wait until a process has ended; raise the error of the thread that sends evidence, if it has failed."""

    def has_ended() -> bool:
        if sending.done():
            sending.result()
        return process.process.poll() is not None

    wait_until(has_ended, "a process to kill itself")


def _group_by_key(messages: list[Any]) -> dict[str, list[bytes]]:
    """Return the values of each key, in order."""
    values: dict[str, list[bytes]] = {}
    for message in messages:
        values.setdefault(message.key.decode(), []).append(message.value)
    return values


def _replay(folder: Path, model_option: tuple[str, Path]) -> dict[str, list[bytes]]:
    """Return the messages of each incident that `replay --incidents` makes of the evidence."""
    words = ("replay", folder / "evidence.jsonl", *model_option, "--incidents", folder / "incidents.jsonl", *RULE)
    subprocess.run(make_command("deformer-stream", *words), env=make_environment(), check=True, capture_output=True)
    values: dict[str, list[bytes]] = {}
    for line in (folder / "incidents.jsonl").read_bytes().splitlines():
        values.setdefault(json.loads(line)["id"], []).append(line)
    return values


def main() -> int:
    """Run the kills with a broker of their own, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.incidents", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="number of kills")
    parser.add_argument("--seconds", type=float, default=3.0, help="mean seconds from start to kill")
    parser.add_argument("--models", type=int, default=1, help="number of models")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="seed of the random numbers")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="deformer-chaos-"))
    print(f"chaos: seed {args.seed}, logs in {folder}", file=sys.stderr, flush=True)
    model_option = ("--model", write_model(folder / "model"))
    if args.models > 1:
        model_option = ("--models", write_folder(folder / "models", args.models))
    with load_broker_script().start() as broker:
        figures = run_kills(broker.bootstrap, model_option, folder, args.kills, args.seconds, args.seed)
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
