"""The examples at the end of the help of each command: what each does, and its command line."""

from __future__ import annotations

EXAMPLES_BY_COMMAND: dict[str, tuple[tuple[str, str], ...]] = {
    "init": (
        (
            "Look at a historian's export, ask what a record is, and write deformer.toml:",
            "deformer-stream init export.csv",
        ),
        (
            "Ask nothing, and name the column that marks faults:",
            "deformer-stream init export.csv --yes --label fault --normal 0",
        ),
        (
            "Convert JSON lines with one reading each to a table, and write deformer.toml for both:",
            "deformer-stream init readings.jsonl",
        ),
        (
            "Look at a topic for a minute, and save its readings as a table:",
            "deformer-stream init --topic sensors --listen 1m --save readings.parquet",
        ),
    ),
    "consume": (
        (
            "Score a topic and print alerts, at most 1% false ones:",
            "deformer-stream consume --topic sensors --model model --alpha 1%",
        ),
        (
            "Write alerts as JSON lines, and serve metrics:",
            "deformer-stream consume --topic sensors --model model --alerts alerts.jsonl --http :9464",
        ),
        (
            "Score JSON lines from standard input:",
            "tail -f readings.jsonl | deformer-stream consume --source - --model model",
        ),
    ),
    "replay": (
        (
            "Score each record of a table, and write its alerts:",
            "deformer-stream replay pumps.parquet --model model --records records.parquet --alerts alerts.jsonl",
        ),
        (
            "Raise warnings at 5% and severe alerts at 1%:",
            "deformer-stream replay pumps.parquet --model model --alpha 5%,1% --alerts alerts.jsonl",
        ),
        (
            "How many known faults are found, and how early:",
            "deformer-stream replay past-faults.parquet --model model --label fault --normal none",
        ),
        (
            "Write what was wrong in each alert as a table:",
            "deformer-stream replay pumps.parquet --model model --explain explanations.parquet",
        ),
        (
            "Make one incident of each fault, at most one false incident per pump and month:",
            'deformer-stream replay may.parquet --model model --incidents found.jsonl --incident-budget "1 per 30d"',
        ),
        (
            "Score a year of logs with eight processes; the same command continues after an interruption:",
            "deformer-stream replay s3://plant/logs --model model --output-dir year --workers 8",
        ),
    ),
    "calibrate": (
        (
            "Calibrate on new normal records of the same plant:",
            "deformer-stream calibrate normal-may.parquet --model model --out model-may",
        ),
        (
            "Calibrate each pump on its own, if records are named pump/number:",
            "deformer-stream calibrate normal-may.parquet --model model --out model-may --group-by /",
        ),
        (
            "Calibrate on a year of logs with eight processes; the same command continues an interrupted run:",
            "deformer-stream calibrate 'normal/*.parquet' --model model --out model-2 --workers 8",
        ),
        (
            "Calibrate the incident budget on a month of normal operation, after replay --evidence june.jsonl:",
            "deformer-stream calibrate --incidents june.jsonl --model model",
        ),
    ),
    "incidents": (
        (
            "Make incidents, at most one false incident per machine and month, and notify Alertmanager:",
            "deformer-stream incidents --topic sensors --model model --alertmanager http://alertmanager:9093",
        ),
        (
            "Accept a false incident per machine and week, and send incidents as signed requests:",
            'deformer-stream incidents --topic sensors --model model --incident-budget "1 per w" '
            "--webhook https://example.org/hook --webhook-secret-file secret",
        ),
    ),
    "feedback": (
        (
            "Say that an incident is a real fault, and which one:",
            'deformer-stream feedback 5ed3c4ff true --topic sensors --name "blocked discharge"',
        ),
        (
            "Silence an incident that is a false alarm:",
            "deformer-stream feedback 5ed3c4ff false-alarm --topic sensors",
        ),
        (
            "Silence the incidents of a device during its maintenance:",
            "deformer-stream feedback --topic sensors --maintenance pump-7 --from 2026-11-23T22:00:00Z "
            "--to 2026-11-24T04:00:00Z",
        ),
        (
            "Say that a record without an alert, which propose has offered for review, was faulty:",
            "deformer-stream feedback true --topic sensors --record pump-7@2026-11-23T22:00:10Z",
        ),
    ),
    "dead-letters": (
        (
            "Count the rejected messages of a topic by reason:",
            "deformer-stream dead-letters list --topic sensors",
        ),
        (
            "Print the latest ones with one reason, as JSON lines:",
            "deformer-stream dead-letters show --topic sensors --reason unknown_feature --limit 5",
        ),
        (
            "Send them again after a new model has the feature; with --dry-run, they are only counted:",
            "deformer-stream dead-letters replay --topic sensors --reason unknown_feature",
        ),
        (
            "Translate messages that bridge has rejected with another pattern, and send their events to sensors:",
            "deformer-stream dead-letters replay --topic sensors --dead-letter-topic sensors-bridge-dead-letter "
            "--pattern 'plant/{device}/{feature}/#'",
        ),
    ),
    "propose": (
        (
            "Learn from the labels of operators, and show what would change on kept evidence:",
            "deformer-stream propose --model model --log evidence.jsonl --feedback labels.jsonl --out candidate",
        ),
        (
            "The same with the evidence and the labels of a live stream:",
            "deformer-stream propose --model model --topic sensors --out candidate",
        ),
        (
            "Put the candidate in use after a look at candidate/report.html:",
            "deformer-stream propose --model model --approve candidate --by Ada",
        ),
        (
            "Take the last approval back:",
            "deformer-stream propose --model model --roll-back",
        ),
    ),
    "bridge": (
        (
            "Pass the values of topics such as plant/pump-7/flow on to a topic that consume reads:",
            "deformer-stream bridge --source mqtt://localhost/plant/# --pattern 'plant/{device}/{feature}' "
            "--topic sensors",
        ),
        (
            "Pass Sparkplug B on, with TLS and a login:",
            "deformer-stream bridge --source mqtts://broker.plant.example/spBv1.0/# --topic sensors "
            "--source-username bridge --source-password-file password",
        ),
        (
            "Subscribe to the variables below an object of an OPC UA server:",
            "deformer-stream bridge --source opc.tcp://plc.plant.example:4840 --nodes 'ns=2;i=5' --topic sensors",
        ),
    ),
    "produce": (
        (
            "Send a table in random delays of up to 5 s, 2000 readings a second:",
            "deformer-stream produce pumps.parquet --topic sensors --shuffle-within 5s --rate 2000",
        ),
        (
            "Send a table by device, as `incidents` needs it, and with the features that the model of each row has:",
            "deformer-stream produce machines.parquet --topic machines --key device --models models",
        ),
        ("Write a table as JSON lines:", "deformer-stream produce pumps.parquet --output readings.jsonl"),
    ),
    "impute": (
        (
            "Fill missing values, with 95% intervals:",
            "deformer-stream impute gaps.parquet --model model --output filled.parquet --interval 95%",
        ),
        (
            "Draw 20 random completions of each row:",
            "deformer-stream impute gaps.parquet --model model --output draws.parquet --draws 20",
        ),
    ),
    "sample": (
        (
            "Draw 10,000 normal records:",
            "deformer-stream sample --model model --count 10000 --output samples.parquet",
        ),
    ),
    "serve": (
        (
            "Show the incidents of a topic on this machine, at http://127.0.0.1:8080:",
            "deformer-stream serve --topic sensors --model model",
        ),
        (
            "Show them to a control room, which logs in with a token, behind a proxy with HTTPS:",
            "deformer-stream serve --topic sensors --http 0.0.0.0:8080 --token-file token "
            "--external-url https://plant.example",
        ),
        ("Make the hash of a password for --users-file:", "deformer-stream serve --hash"),
    ),
    "inspect": (
        ("Show the features and thresholds of a model:", "deformer-stream inspect model"),
        ("Read the manifest in a program:", "deformer-stream inspect model --json | jq .calibration"),
    ),
    "config": (
        (
            "Show which value each option of consume has, and where it comes from:",
            "deformer-stream config consume --config deformer.toml",
        ),
    ),
    "demo": (
        ("Watch incidents of simulated pumps in a browser, without Kafka:", "deformer-stream demo --page"),
        ("Run the demo with a longer training:", "deformer-stream demo --output demo-output --train-time 5m"),
    ),
    "completion": (
        ("Complete commands in each new bash:", "echo 'eval \"$(deformer-stream completion bash)\"' >> ~/.bashrc"),
        ("In fish:", "deformer-stream completion fish > ~/.config/fish/completions/deformer-stream.fish"),
    ),
}
