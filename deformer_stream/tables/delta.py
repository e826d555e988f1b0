"""The data files of the current version of a Delta Lake table, from its log of commits (extra `delta`: deltalake)."""

from __future__ import annotations

from urllib.parse import unquote

from deformer_stream.errors import InputError, summarize_error
from deformer_stream.tables.data_files import get_s3_server

DELTA_LOG = "_delta_log"
"""Name of the folder with the log."""

_UNSUPPORTED = {
    "deletionVectors": "some rows of its files may be deleted",
    "columnMapping": "its files have other names of columns",
}
_REMEDY = "write the current version to plain Parquet files, and give their folder"


def list_delta_files(table: str) -> list[str]:
    """Return the paths of the data files of the current version, relative to the folder of the table.

    Args:
        table: The path or the URL of the folder of the table.

    Raises:
        InputError: The log cannot be read, or the table has a feature with which its files cannot be read alone.
    """
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        delta = DeltaTable(table, storage_options=_make_storage_options(table))
        protocol, configuration = delta.protocol(), delta.metadata().configuration
        actions = delta.get_add_actions()
        paths = [unquote(path) for path in actions["path"].to_pylist()]
    except (DeltaError, OSError, ValueError) as error:
        reason = summarize_error(error)[:300]
        raise InputError(f"{table}: this Delta Lake table cannot be read ({reason}); {_REMEDY}") from error
    if not paths:
        raise InputError(f"{table}: the current version of this Delta Lake table has no files; check the path")
    features = set(protocol.reader_features or ())
    if configuration.get("delta.columnMapping.mode", "none") != "none":
        features.add("columnMapping")
    for feature, meaning in _UNSUPPORTED.items():
        if feature in features:
            raise InputError(f"{table}: this Delta Lake table has the feature {feature} ({meaning}): {_REMEDY}")
    for name in delta.metadata().partition_columns:
        outside = next((path for path in paths if f"{name}=" not in path), None)
        if outside is not None:
            raise InputError(
                f"{table}: the folder of {outside} does not state the value of the partition column {name!r}; {_REMEDY}"
            )
    return sorted(paths)


def _make_storage_options(table: str) -> dict[str, str]:
    """Return the settings of the object store that deltalake does not take from the environment as Arrow does."""
    if not table.startswith("s3://"):
        return {}
    endpoint, region = get_s3_server()
    options = {"AWS_REGION": region or "us-east-1"}
    if endpoint is not None:
        options["AWS_ENDPOINT_URL"] = endpoint
        options["AWS_ALLOW_HTTP"] = str(endpoint.startswith("http://")).lower()
    return options
