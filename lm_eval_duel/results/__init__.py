"""Results as records: read, matched, compared, and shown as reports, leaderboards, pages and figures."""
