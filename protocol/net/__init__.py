"""The only input and output at this level: transports, directories and clocks behind one seam each."""
