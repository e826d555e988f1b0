"""A folder of models: one model directory for each value of a field, such as the type of a machine.

    models/
      models.json     the field, and the model directory of each value
      pump/           a model directory
      compressor/
      _fleet-1f3a…/   a model that others were adapted from; it is not the model of a value

`deformer-train --per FIELD` writes such a folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from deformer_stream.durable_file import replace_file
from deformer_stream.errors import ArtifactError, ConfigError

MODELS_FILE = "models.json"
"""Name of the file that lists the models of a folder."""

FLEET_PREFIX = "_fleet-"
"""The beginning of the names of the model directories of fleet models. It is no value's folder, because those do not
begin with "_". The rest is a digest of the names of the features."""

FORMAT_VERSION = 1

MAX_NAME_BYTES = 200
"""Largest length of the name of a model's folder. Most file systems allow 255 bytes, and the working folder of a
training is longer than the name."""

_REMEDY = "restore it from a copy, or train again with deformer-train --per"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """The model of one value of the field.

    Attributes:
        folder: Name of the model directory in the folder of models.
        fingerprint: The model's fingerprint when it was trained.
        records: Number of normal records of its training table, calibration included.
        adapted: Whether the model was adapted from the fleet model, because the value has few records.
        input: Hexadecimal digest of the rows and the options of the training, to recognise finished trainings.
    """

    folder: str
    fingerprint: str
    records: int
    adapted: bool
    input: str


@dataclass(frozen=True, slots=True)
class ModelSet:
    """The models of a folder.

    Attributes:
        field: The field of a message, or the column of a table, whose value determines the model.
        entry_by_value: The model of each value.
        fleet_inputs: As `ModelEntry.input`, of each fleet model, by the name of its folder.
    """

    field: str
    entry_by_value: Mapping[str, ModelEntry] = dataclass_field(default_factory=dict)
    fleet_inputs: Mapping[str, str] = dataclass_field(default_factory=dict)


def make_folder_name(value: str) -> str:
    """Return the name of the model directory of a value: the value, with percent signs for unsafe characters.

    Letters and digits of ASCII, spaces and some punctuation stay as they are. Different values have different names.

    Raises:
        ConfigError: The value is empty, or too long for the name of a folder.
    """
    name = quote(value, safe=" +,;=@()")
    if name[:1] in ("_", "."):  # hidden folders, and the fleet model
        name = f"%{ord(name[0]):02X}{name[1:]}"
    name = name.replace(".training", "%2Etraining")  # the working folder of a training ends so
    if not name or len(name) > MAX_NAME_BYTES:
        raise ConfigError(
            f"the value {value[:40]!r} cannot be the name of a model directory, because it is "
            f"{'too long' if name else 'empty'}; choose another field, or leave out its rows"
        )
    return name


def read_model_set(directory: Path) -> ModelSet | None:
    """Return the models that the file models.json of a folder lists; None if there is no such file.

    Raises:
        ArtifactError: The file cannot be read or is damaged.
    """
    path = Path(directory) / MODELS_FILE
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from None
    try:
        document = json.loads(raw)
        version = document["format"]
        if version == FORMAT_VERSION:
            entries = {str(value): _parse_entry(entry) for value, entry in document["models"].items()}
            fleets = {str(name): str(digest) for name, digest in document.get("fleets", {}).items()}
            return ModelSet(str(document["field"]), entries, fleets)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged ({' '.join(str(error).split())[:200]}): {_REMEDY}") from None
    raise ArtifactError(
        f"{path} has the format {version!r:.20}, but this release reads {FORMAT_VERSION}: install the release that "
        "wrote it"
    )


def find_models(directory: Path) -> tuple[str | None, dict[str, Path]]:
    """Return the models of a folder: those of its file models.json, or else each model directory in it.

    Returns:
        The field whose value determines the model, None without models.json; and the model directory by value. Without
        models.json, the value is the name of the folder, in which percent signs stand as in `make_folder_name`. Folders
        whose names begin with "_" or "." are no models of a value.

    Raises:
        ArtifactError: There is no model, or models.json cannot be read or is damaged.
    """
    directory = Path(directory)
    models = read_model_set(directory)
    if models is not None:
        field, path_by_value = models.field, {v: directory / e.folder for v, e in models.entry_by_value.items()}
    else:
        try:
            paths = [path.parent for path in sorted(directory.glob("*/manifest.json"))]
        except OSError as error:
            raise ArtifactError(f"{directory} cannot be read ({error.strerror}): check --models") from None
        field, path_by_value = None, {unquote(path.name): path for path in paths if path.name[0] not in "_."}
    if not path_by_value:
        raise ArtifactError(
            f"{directory} has no model directories: give the folder that deformer-train --per wrote with --out"
        )
    return field, path_by_value


def _parse_entry(entry: Mapping[str, Any]) -> ModelEntry:
    """Return the entry of a model from its JSON object.

    Raises:
        KeyError: A field is missing.
        ValueError: The folder is not the name of a folder in the folder of models.
    """
    folder = str(entry["folder"])
    if folder in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(folder):
        raise ValueError(f"{folder!r:.40} is not the name of a model directory")
    return ModelEntry(
        folder, str(entry["fingerprint"]), int(entry["records"]), bool(entry["adapted"]), str(entry["input"])
    )


def write_model_set(directory: Path, models: ModelSet) -> None:
    """Write the file models.json of a folder. An existing file is replaced atomically.

    Raises:
        Unavailable: Writing fails, for example because the disk is full.
    """
    document: dict[str, Any] = {"format": FORMAT_VERSION, "field": models.field}
    document["models"] = {value: asdict(entry) for value, entry in sorted(models.entry_by_value.items())}
    if models.fleet_inputs:
        document["fleets"] = dict(sorted(models.fleet_inputs.items()))
    replace_file(Path(directory) / MODELS_FILE, json.dumps(document, indent=1).encode())
