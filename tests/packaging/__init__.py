"""The package as it is built: its files, and a trial of the wheel outside the checkout."""
