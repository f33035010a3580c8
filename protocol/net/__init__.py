"""The only input and output at this level: transports, directories, clocks, each behind a seam."""
