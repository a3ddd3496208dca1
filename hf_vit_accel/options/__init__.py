"""Long calls in passes (`max_rows`), one image for many (`reuse`), one call for the ranks of a group (`data_parallel`)."""
