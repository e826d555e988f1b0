"""Coverage-guided fuzzing, one target after the other: `python -m tests.fuzz --seconds 60 [TARGET …]`.

Each target runs in a process of its own with limits on time and memory. The exit status is 1 if an input breaks an
invariant. That input is kept in the folder given by `--folder`, for a regression test. `python -m tests.fuzz --again
TARGET FILE` runs it again.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from pathlib import Path

SEEDS = Path(__file__).parent / "corpus"
TARGETS = (
    *("one_message", "messages", "arrow_messages", "registry_messages", "long_tables", "wide_tables"),
    *("model_directories", "saved_states", "model_choices", "evidence", "incident_states", "incident_calibrations"),
    *("state_folders", "avro_outputs"),
    *("input_urls", "conditions", "condition_grammar", "model_sets", "compressed_files", "bridge_payloads"),
    *("sparkplug_payloads", "avro_schemas"),
)
MEMORY_MIB, SLOW_SECONDS = 3000, 120


def run_fuzzer(target: str, seconds: int, folder: Path) -> int:
    """Fuzz one target in a child process and return its exit status."""
    corpus, finds = folder / "corpus" / target, folder / "finds"
    for made in (corpus, finds):
        made.mkdir(parents=True, exist_ok=True)
    for seed in range(16):
        (corpus / f"seed-{seed}").write_bytes(random.Random(seed).randbytes(64 << seed % 4))  # noqa: S311
    words = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.guided", target, str(corpus)]
    words += [str(SEEDS / target)] if (SEEDS / target).is_dir() else []
    words += [
        f"-max_total_time={seconds}",
        f"-timeout={SLOW_SECONDS}",
        f"-rss_limit_mb={MEMORY_MIB}",
        "-max_len=1024",
        "-len_control=0",
    ]
    words += [f"-artifact_prefix={finds}/{target}-", f"-dict={_make_dictionary(folder)}", "-print_final_stats=1"]
    return subprocess.run(words, check=False).returncode


def _make_dictionary(folder: Path) -> Path:
    """Return the fragments of hostile messages in the fuzzer's dictionary format."""
    lines = [line for name in ("values.txt", "times.txt") for line in (SEEDS.parent / name).read_bytes().splitlines()]
    path = folder / "fragments.dict"
    path.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in line) + '"\n' for line in lines))
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Coverage-guided fuzzing.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all by default")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="where the corpus grows and finds are kept")
    parser.add_argument("--again", type=Path, metavar="FILE", help="run the target on this input, once")
    args = parser.parse_args()
    unknown = [name for name in args.targets if name not in TARGETS]
    if unknown:
        parser.error(f"no target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    if args.again:
        from tests.fuzz import targets

        targets.TARGETS[args.targets[0]](args.again.read_bytes())
        return 0
    failed = [name for name in args.targets or TARGETS if run_fuzzer(name, args.seconds, args.folder) != 0]
    print(f"fuzz: {len(args.targets or TARGETS)} targets, {args.seconds} s each, finds in {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
