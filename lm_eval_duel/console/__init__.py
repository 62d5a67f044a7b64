"""Shared by all commands: reading arguments, ending a command, writing tables and JSON."""
