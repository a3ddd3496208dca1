"""Options around one encoded pass: `max_rows` (passes), `reuse` (equal images), `data_parallel` (ranks)."""
