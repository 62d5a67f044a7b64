"""What commands share: how arguments are read, how a command ends, and how tables and JSON are written."""
