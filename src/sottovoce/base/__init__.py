"""What everything else stands on: errors, files, random streams, processes."""
