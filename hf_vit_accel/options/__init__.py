"""Options around one encoded pass: `max_rows` (several passes), `reuse` (one image for many), `data_parallel` (ranks)."""
