"""Tests of what is deployed that need further programs; `make test-deploy` installs and runs them."""
