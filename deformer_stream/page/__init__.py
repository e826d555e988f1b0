"""The operator's page: it shows incidents in a browser, with live updates, and takes labels."""
