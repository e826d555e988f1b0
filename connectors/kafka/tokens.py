"""Login tokens for the SASL mechanism OAUTHBEARER that are not requested by the client library itself."""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deformer_stream.errors import ConfigError
from deformer_stream.settings.logins import read_secret

DEFAULT_LIFETIME_SECONDS = 300.0
"""Seconds after which a token is read again if it does not state when it expires."""

TokenProvider = Callable[[], tuple[str, float]]
"""A function that returns a token, and the time at which it expires in seconds since 1970."""


def make_token_provider(security: Mapping[str, Any]) -> TokenProvider | None:
    """Return a function that provides the tokens of a login, or None if the login needs none from this process.

    Args:
        security: The security options of a `KafkaCluster`.

    Raises:
        ConfigError: The package that signs tokens for AWS is not installed, or no AWS region is set.
    """
    if "sasl_oauth_token_file" in security:
        path = Path(security["sasl_oauth_token_file"])

        def read_token() -> tuple[str, float]:
            token = read_secret("--sasl-oauth-token-file", path).strip()
            return token, _find_expiry(token)

        return read_token
    if security.get("sasl_mechanism") == "AWS_MSK_IAM":
        return _make_aws_provider(security.get("sasl_aws_region"))
    return None


def _find_expiry(token: str) -> float:
    """Return when a token expires, in seconds since 1970: the claim `exp` of a JSON Web Token, or a default.

    The signature is not checked, because that is the broker's task.
    """
    default = time.time() + DEFAULT_LIFETIME_SECONDS
    parts = token.split(".")
    if len(parts) != 3:
        return default
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (binascii.Error, ValueError, KeyError, TypeError):
        return default


def _make_aws_provider(region: str | None) -> TokenProvider:
    """Return a function that signs tokens for Amazon MSK with the AWS credentials of this process.

    Args:
        region: The AWS region of the cluster, or None for the one that the AWS SDK is configured with.
    """
    try:
        from aws_msk_iam_sasl_signer import MSKAuthTokenProvider
        from botocore.session import get_session
    except ImportError as error:
        raise ConfigError(
            "--sasl-mechanism AWS_MSK_IAM needs the package aws-msk-iam-sasl-signer-python, which is not installed: "
            "install deformer-stream[msk]"
        ) from error
    region = region or get_session().get_config_variable("region")
    if not region:
        raise ConfigError("--sasl-mechanism AWS_MSK_IAM needs the region of the cluster: set --sasl-aws-region")

    def sign_token() -> tuple[str, float]:
        token, expires_at_ms = MSKAuthTokenProvider.generate_auth_token(region)
        return token, expires_at_ms / 1000

    return sign_token
