"""The command `init`: the first look at unknown data, and the first configuration file."""
