"""One image for many (`reuse`), and one call for the ranks of a process group (`data_parallel`)."""
