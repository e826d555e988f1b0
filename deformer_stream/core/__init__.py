"""The pure heart: no IO, no clock, no environment, no logging. Values come in, decisions go out."""
