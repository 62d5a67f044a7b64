"""Results as records: read, matched, compared, and shown as reports, pages and figures.

A number on its way from a file to a table:

    results_*.json     read.py       a file becomes a `Run` with its `Task`s (runs.py), checked entry by entry
                       schema.py     the entries that are read, and the type of each
    samples, traces    read.py       (nats, units) of each document; traced.py: of the other values of a lattice run
                       match.py      runs that may share a table, or the first field in which they differ
                       rows.py       a `Row` for each value of a run's task: its `Value`, its errors, its name
                       compare.py    a `ComparedRow` for each row: whether it is the best, and by gaps.py its interval
                                     (stats.py), the gap that it closes and what its cache costs; notes.py: notes on all
                       standings.py  the rows of one method over tasks: means and ranks
                       costs.py      the time of each run, over the times of others
    tables             columns.py    which columns a table of rows has, and run_tables.py: one of whole runs; table.py:
                                     numbers as text, and the table's forms
    report.md, ...     report.py     what a report consists of; headlines.py: its sentences; published.py: figures of
                                     others; files.py: report.json and report.csv
                       figures.py, page.py

Each step makes a record that is complete, and the next one only reads it. Nothing is computed in a view. trace.py
writes and reads the files of orders, for runs too.
"""
