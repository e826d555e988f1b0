"""The operator's page: incidents in a browser, live, with buttons for labels."""
