"""Results as records: read, matched, compared, and shown as reports, pages and figures."""
