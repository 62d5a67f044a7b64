"""Arguments, exit codes, tables and JSON of all commands."""
